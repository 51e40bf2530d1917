"""Measured power of servers: what a row is read as, and fits that find what made the rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.cost.power import PowerFit
from perfmodel.evidence.fit.power import fit_power, predict_energy, steps_of
from perfmodel.evidence.kinds.runs import validate_energy
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.sources.steady import read_energy_rows
from perfmodel.planning.typical_step import mean_prompt

NAMES = (
    "id,task,model,weight_precision,gpu,num_gpus,dp,max_num_seqs,engine,server_args,avg_batch_size,avg_output_len,"
    "output_tokens_per_s,itl_p50_ms,power_w,energy_per_output_token_j"
)
FIT = PowerFit(active_share=0.2, compute=0.8, exponent=0.5)


@pytest.fixture
def rows(tmp_path: Path) -> list[Observation]:
    """Eight deployments of two models on H100 and B200, and one of images."""
    lines = [
        f"{model}-{gpu}-{size},lm-arena-chat,{model},bfloat16,{gpu},1,1,{size},vllm 0.11.1,,{size},400,999,9,500,1"
        for model in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-14B")
        for gpu in ("H100", "B200")
        for size in (8, 128)
    ]
    file = tmp_path / "energy.csv"
    images = lines[0].replace("lm-arena-chat", "image-chat")
    file.write_text("\n".join([NAMES, *lines, images, lines[0].replace("lm-arena-chat", "audio-chat")]))
    read, left_out = read_energy_rows(file)
    assert [reason for _, reason in left_out] == [
        "meta-llama/Llama-3.1-8B-Instruct: its encoder of images is not known.",
        "audio-chat: its prompts are not known.",
    ]
    return read


def measured(row: Observation, fit: PowerFit, factor: float = 1.0) -> Observation:
    """The row with what `fit` predicts, power and energy times `factor`."""
    metrics = dict(predict_energy(row, fit).metrics)
    return replace(row, metrics=metrics | {name: factor * metrics[name] for name in ("power", "energy_per_token")})


def test_a_full_batch_decodes_and_prompts_follow_the_answers_that_end(rows: list[Observation]) -> None:
    """One of 400 steps of 8 sequences in 50 has a prompt: the mean step is longer than one that decodes, by less than
    a prompt's own step."""
    for row in rows:
        steps, metrics = steps_of(row), predict_energy(row, FIT).metrics
        assert steps.median_s < steps.mean_s < 2 * steps.median_s
        assert metrics["energy_per_token"] * metrics["tokens_per_s"] == pytest.approx(metrics["power"])
        assert metrics["itl"] == pytest.approx(1e3 * steps.median_s)


def test_prompts_of_an_image_model_have_its_tokens_and_its_encoder(tmp_path: Path) -> None:
    """One image of 1,200 x 900 is 28 x 38 tokens of Qwen3-VL (900 / 32 = 28.1, 1,200 / 32 = 37.5, to even), with two
    marks and 90 tokens of text: a mean step is longer than one of as much text by 8 / 400 of the encoder's time."""
    row = "{0},{0},Qwen/Qwen3-VL-8B-Instruct,bfloat16,H100,1,1,8,vllm 0.11.1,,8,400,999,9,500,1"
    file = tmp_path / "energy.csv"
    file.write_text("\n".join([NAMES, row.format("image-chat")]))
    (seen,), _ = read_energy_rows(file)
    assert mean_prompt(seen.scenario) == 28 * 38 + 2 + 90
    lengths = seen.scenario.traffic.input_tokens
    assert lengths is not None
    traffic = seen.scenario.traffic.model_copy(
        update={"images": None, "input_tokens": lengths.model_copy(update={"value": 28 * 38 + 92})}
    )
    read = seen.under(seen.scenario.model_copy(update={"traffic": traffic}))
    mean, other = (steps_of(row) for row in (seen, read))
    assert mean.median_s == other.median_s
    assert 8 / 400 * 0.005 < mean.mean_s - other.mean_s < 8 / 400 * 0.03
    assert fit_power([seen, measured(read, FIT)], is_crossed=False) == fit_power(
        [measured(read, FIT)], is_crossed=False
    )


def test_the_median_step_has_prompts_where_most_steps_have(tmp_path: Path) -> None:
    """Answers of 400 tokens end in a quarter of the steps of 100 sequences and in three quarters of those of 300."""
    row = "{0},lm-arena-chat,meta-llama/Llama-3.1-8B-Instruct,bfloat16,H100,1,1,{0},vllm 0.11.1,,{0},400,999,9,500,1"
    file = tmp_path / "energy.csv"
    file.write_text("\n".join([NAMES, *(row.format(size) for size in (100, 300))]))
    few, many = map(steps_of, read_energy_rows(file)[0])
    assert few.median_s < few.mean_s
    assert many.median_s > many.mean_s


def test_all_data_parallel_ranks_wait_for_the_one_with_a_prompt(tmp_path: Path) -> None:
    """Of eight ranks with 16 sequences each, one or more has a prompt in 1 - 0.96^8 of the steps where answers have 400
    tokens, in 1 - 0.98^8 where they have 800: 1.87 times as often, not twice. With 260 sequences nearly all
    steps have."""
    row = "{0},sourcegraph-fim,Qwen/Qwen3-30B-A3B-Instruct-2507,bfloat16,B200,8,8,{1},vllm 0.11.1,"
    row += "--enable-expert-parallel,{1},{2},999,9,500,1"
    file = tmp_path / "energy.csv"
    lines = [row.format(name, *sizes) for name, sizes in zip("abc", [(128, 400), (128, 800), (2080, 400)], strict=True)]
    file.write_text("\n".join([NAMES, *lines]))
    short, long, full = map(steps_of, read_energy_rows(file)[0])
    waits = [steps.mean_s - steps.median_s for steps in (short, long)]
    assert waits[0] / waits[1] == pytest.approx((1 - 0.96**8) / (1 - 0.98**8), rel=0.02)
    assert full.median_s == pytest.approx(full.mean_s, rel=0.05)


def test_a_fit_of_power_finds_what_made_the_rows_and_knows_them_all(rows: list[Observation]) -> None:
    made = [measured(row, FIT) for row in rows]
    fit = fit_power(made)
    for row in made:
        assert predict_energy(row, fit).metrics["power"] == pytest.approx(row.metrics["power"], rel=0.02)
    assert max(abs(fit.residuals.p10), abs(fit.residuals.p90)) < 0.1


def test_its_residuals_are_of_models_that_it_was_not_fitted_to(rows: list[Observation]) -> None:
    """A model that draws 1.4 times as much is predicted too low by the fit to the other, that one too high."""
    made = [measured(row, FIT, 1.4 if "Qwen" in row.name else 1.0) for row in rows]
    residuals = fit_power(made).residuals
    assert residuals.num_rows == len(made)
    assert residuals.p90 > 0.2
    assert residuals.p10 < -0.2


def test_the_comparison_has_power_and_energy_by_model(rows: list[Observation], tmp_path: Path) -> None:
    report = validate_energy(tmp_path / "energy.csv")
    assert (report.rows, report.covered) == (10, 8)
    assert set(report.metrics) == {"itl", "tokens_per_s", "power", "energy_per_token"}
