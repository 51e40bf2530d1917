"""`validate --leave-out`: a group's own figures say nothing about its predictions, those of the others do."""

import gzip
from pathlib import Path

import pytest

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence import leave_out
from perfmodel.evidence.fit import backends
from perfmodel.evidence.leave_out import GROUPS, validate_left_out
from perfmodel.evidence.observation import Observation, Prediction
from perfmodel.specs import load_scenario

KERNELS = Path(__file__).resolve().parents[3] / "measurements/operators/a100_sxm/context_attention.csv.gz"
MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen3-14b")


def row(model: str, tpot_ms: float, concurrency: int = 8) -> Observation:
    changes = [f"model={model}", f"traffic.arrivals={{process: closed_loop, concurrency: {concurrency}}}"]
    metrics = {"tpot_mean": tpot_ms, "ttft_mean": tpot_ms}
    return Observation(model, load_scenario("llama-3.1-8b-a100", changes), metrics, label=model)


def predictions(rows, progress=None, profile=None, intervals=False):
    """What a simulator whose times are one parameter of the engine gives, in ms."""
    time_ms = 1e3 * profile.host.prompt_step_s
    metrics = {"tpot_mean": time_ms, "ttft_mean": time_ms}
    return [Prediction(item, metrics, scenario=item.scenario, details={"is_shortened": False}) for item in rows]


@pytest.fixture
def held_out(monkeypatch):
    monkeypatch.setattr(leave_out, "simulate_steady_states", predictions)

    def of(rows, group):
        monkeypatch.setattr(leave_out, "read_steady_states", lambda path: (rows, []))
        (comparison,) = (
            item for item in validate_left_out("steady-state", "x", group).comparisons if item.metric == "tpot_mean"
        )
        return dict(zip(comparison.rows.labels, comparison.rows.predicted.tolist(), strict=True))

    return of


@pytest.mark.parametrize("group", ["model", "cell"])
def test_a_groups_own_figures_say_nothing_about_its_predictions(held_out, group):
    usual = held_out([row(MODELS[0], 4.0), row(MODELS[1], 4.0), row(MODELS[2], 4.0)], group)
    slow = held_out([row(MODELS[0], 40.0), row(MODELS[1], 4.0), row(MODELS[2], 4.0)], group)
    assert slow[MODELS[0]] == pytest.approx(usual[MODELS[0]], rel=1e-3)
    assert slow[MODELS[1]] > 1.1 * usual[MODELS[1]]


def test_without_any_rest_predictions_are_those_that_fits_start_from(held_out):
    """All rows are of one engine: without it nothing is left to fit to, neither committed values nor these figures."""
    (alone, slow) = (held_out([row(MODELS[0], time_ms), row(MODELS[1], time_ms)], "engine") for time_ms in (4.0, 40.0))
    assert alone == slow == pytest.approx({MODELS[0]: 3.0, MODELS[1]: 3.0})  # the prior of host.prompt_step_s, 3 ms


@pytest.fixture
def prompts(tmp_path):
    """A table of prompt attention: (factor on its times) -> its folder. Every hundredth row of the committed one."""

    def of(factor):
        lines = gzip.decompress(KERNELS.read_bytes()).decode().splitlines()
        rows = [line.split(",") for line in (line for line in lines[1:] if line.startswith("vllm"))][::100]
        place = lines[0].split(",").index("latency_ms")
        rows = [[*row[:place], str(factor * float(row[place])), *row[place + 1 :]] for row in rows]
        folder = tmp_path / str(factor) / KERNELS.parent.name
        folder.mkdir(parents=True)
        (folder / "context_attention.csv").write_text("\n".join([lines[0], *map(",".join, rows)]))
        return folder.parent

    return of


@pytest.mark.parametrize("group", ["device", "engine"])
def test_times_of_kernels_that_are_left_out_say_nothing_about_their_predictions(prompts, group):
    usual, slow = (validate_left_out("operators", prompts(factor), group).comparisons[0].rows for factor in (1, 3))
    assert slow.predicted == pytest.approx(usual.predicted)
    assert slow.measured == pytest.approx(3 * usual.measured)


def test_the_kernel_that_stands_in_for_one_left_out_is_of_its_form(prompts, monkeypatch):
    """A kernel of another form with the very key is none."""
    related = leave_out._related

    def strange(rows, own, left_out):
        other = related(rows, own, left_out)
        latent = next(fit for fit in own.families.values() if fit.form == "latent_prefill")
        return other.model_copy(update={"families": {rows.key: latent} | other.families | {rows.key: latent}})

    usual = validate_left_out("operators", prompts(1), "device").comparisons[0].rows
    monkeypatch.setattr(leave_out, "_related", strange)
    assert validate_left_out("operators", prompts(1.0), "device").comparisons[0].rows.predicted == pytest.approx(
        usual.predicted
    )


TABLE = (
    "id,device,device_class,backend,model,model_params,gguf_type,test,n_prompt,n_gen,tokens_per_s,group,flags\n"
    + "".join(
        f"{device}-{test},{device},gpu,cuda,meta-llama/Llama-3.1-8B-Instruct,8e9,Q4_K_M,{test},{sizes},{rate},g{test},\n"
        for device, factor in (("rtx-4090-24gb", 1.0), ("rtx-3090-24gb", 0.8))
        for test, sizes, rate in (("tg", "0,128", 130 * factor), ("pp", "512,0", 9000 * factor))
    )
)


def test_rows_of_single_machines_are_those_of_the_fit_that_left_them_out(tmp_path, monkeypatch):
    file = tmp_path / "figures.csv"
    file.write_text(TABLE)
    usual = validate_left_out("local", file, "device")
    assert usual.covered == usual.rows == 4
    monkeypatch.setattr(leave_out, "held_out", lambda rows, folder, by: _doubled(backends.held_out(rows, folder, by)))
    doubled = validate_left_out("local", file, "device")
    for before, after in zip(usual.comparisons, doubled.comparisons, strict=True):
        assert after.rows.predicted == pytest.approx(2 * before.rows.predicted)


def _doubled(result):
    settings, predicted = result
    return settings, 2 * predicted


def test_without_rows_to_fit_a_sentence_says_so(tmp_path):
    file = tmp_path / "figures.csv"
    file.write_text(TABLE.splitlines()[0] + "\n")
    with pytest.raises(PerfmodelError, match="no rows that can be fitted to"):
        validate_left_out("local", file, "device")


def test_an_engine_without_small_rows_is_not_covered(held_out):
    assert held_out([row(MODELS[0], 4.0, concurrency=64), row(MODELS[1], 4.0, concurrency=64)], "model") == {}


def test_what_cannot_be_left_out_is_said():
    with pytest.raises(SpecError, match="got engine; expected device, model with `validate local`"):
        validate_left_out("local", "x", "engine")
    assert set(GROUPS) == {"cell", "model", "device", "engine", "format"}
