"""Figures of single machines: rows, their steps, their models, and a fit that finds the numbers that made them."""

import datetime
import math
from dataclasses import replace

import pytest

from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.backends import fit_backends
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.results import predict_rows
from perfmodel.evidence.sources.local import (
    DeviceTable,
    LocalSetup,
    local_engine,
    local_model,
    read_local_rows,
    row_tests,
)
from perfmodel.models.params import count_parameters, weight_bytes

HEADER = "id,device,device_class,backend,model,gguf_type,test,n_prompt,n_gen,tokens_per_s,group,tool,flags,date\n"


def row(**changed):
    base = LocalSetup(
        device="rtx-4090-24gb",
        device_class="gpu",
        num_devices=1,
        tool="llama-bench",
        backend="cuda",
        backend_detail="",
        build="",
        date=datetime.date(2026, 1, 1),
        model="meta-llama/Llama-3.1-8B-Instruct",
        params=8.03e9,
        active_params=0.0,
        gguf_type="Q4_K_M",
        file_size_bytes=4.92e9,
        flash=True,
        kv_type="f16",
        test="tg",
        num_prompt=0,
        num_generated=128,
        depth=0,
        batch=1,
        ubatch=0,
    )
    return replace(base, **changed)


def test_rows_are_read_and_those_without_a_figure_are_listed(tmp_path):
    table = tmp_path / "figures.csv"
    table.write_text(
        HEADER
        + "a,rtx-4090-24gb,gpu,cuda,m,Q8_0,tg,0,128,50.5,g1,llama-bench,slow: below 25 %,2025-07\n"
        + "b,rtx-4090-24gb,gpu,cuda,m,Q8_0,tg,0,128,,g1,llama-bench,,\n"
        + "c,rtx-4090-24gb,gpu,cuda,m,Q8_0,mixed,0,128,3,g1,llama-bench,,\n"
    )
    rows, left_out = read_local_rows(table)
    assert [each.name for each in rows] == ["a"]
    assert not rows[0].is_reliable
    assert rows[0].setup.date == datetime.date(2025, 7, 1)
    assert left_out == [("b", "no figure in tokens_per_s"), ("c", "test is 'mixed', compared are pp and tg")]


def test_another_table_is_refused_in_a_sentence(tmp_path):
    table = tmp_path / "figures.csv"
    table.write_text("id,latency\n1,2\n")
    with pytest.raises(SpecError, match="is no table of local figures: column device is missing"):
        read_local_rows(table)


def test_generation_stands_at_its_mean_depth():
    """tg128 behind 1,000 tokens: contexts of 1,001 to 1,128, 1,064 in the mean."""
    (test,) = row_tests(row(depth=1000), (), 2048)
    assert [(shape.num_decodes, shape.decode_context) for shape in test.shapes] == [(1, 1064)]
    assert test.tokens == 1


@pytest.mark.parametrize(("length", "batch", "budget"), [(512, 1, 2048), (5000, 1, 2048), (700, 8, 2048), (1, 1, 16)])
def test_every_token_of_a_prompt_is_in_one_step_and_none_is_too_large(length, batch, budget):
    (test,) = row_tests(row(test="pp", num_prompt=length, batch=batch, depth=300), (), budget)
    grants = [grant for shape in test.shapes for grant in shape.prefills]
    assert sum(new for new, _ in grants) == length * batch == test.tokens
    assert max(shape.num_tokens for shape in test.shapes) <= budget
    assert max(new + cached for new, cached in grants) == 300 + length


def test_localscore_is_the_mean_over_its_shapes():
    prompts, answers = (row_tests(row(tool="localscore", test=test), (), 4096) for test in ("pp", "tg"))
    shapes = [
        (1024, 16),
        (4096, 256),
        (2048, 256),
        (2048, 768),
        (1024, 1024),
        (1280, 3072),
        (384, 1152),
        (64, 1024),
        (16, 1536),
    ]
    assert [test.tokens for test in prompts] == [prompt for prompt, _ in shapes]
    assert [test.shapes[0].decode_context for test in answers] == [p + g // 2 for p, g in shapes]


@pytest.mark.parametrize(
    ("build", "date", "version"),
    [
        ("b828e18c7 (7948)", None, "6300"),
        ("83bc2f28 (b6077)", None, "4400"),
        ("", datetime.date(2024, 5, 20), "2900"),
        ("", datetime.date(2023, 1, 1), "2900"),
        ("", None, "11549"),
    ],
)
def test_the_version_is_that_of_the_build_or_of_the_day(build, date, version):
    assert local_engine(row(build=build, date=date)).version == version


@pytest.mark.parametrize("params", [4e8, 1.5e9, 7e9, 24e9, 70e9, 400e9])
def test_a_model_without_a_card_has_its_parameters(params):
    found = local_model("nobody/unheard-of", params, 0.0, "F16", 0.0)
    assert not found.is_known
    assert count_parameters(found.spec).total == pytest.approx(params, rel=0.1)


@pytest.mark.parametrize(("params", "active"), [(30e9, 3e9), (110e9, 12e9), (357e9, 32e9), (20e9, 3.6e9)])
def test_a_mixture_without_a_card_has_its_active_parameters(params, active):
    count = count_parameters(local_model("nobody/unheard-of", params, active, "F16", 0.0).spec)
    assert count.total == pytest.approx(params, rel=0.2)
    assert count.active == pytest.approx(active, rel=0.3)


@pytest.mark.parametrize(
    "file_type", ["Q4_K_M", "UD-Q4_K_XL", "Q8_0", "MXFP4", "MLX-Q4", "IQ3_M", "CUSTOM", "Q4_K_M-X"]
)
def test_a_file_has_the_bytes_that_it_has(file_type):
    spec = local_model("meta-llama/Llama-3.1-8B-Instruct", 0.0, 0.0, file_type, 5.1e9).spec
    kept = weight_bytes(spec)["norms"]  # in 16 bits whatever the type
    assert sum(weight_bytes(spec).values()) == pytest.approx(5.1e9, abs=kept + 1)


def test_a_model_of_which_nothing_is_known_is_refused():
    with pytest.raises(SpecError, match="no card, no parameters, no size in its name and none of its file"):
        local_model("nobody/unheard-of", 0.0, 0.0, "Q4_K_M", 0.0)
    assert local_model("nobody/unheard-of", 0.0, 0.0, "Q8_0", 8.5e9).spec.num_layers > 20


def test_a_device_that_no_file_names_is_built_from_the_table(tmp_path):
    (tmp_path / "devices.csv").write_text(
        "device,class,memory_gb,memory_bandwidth_gb_s,fp16_tensor_dense_tflops,fp32_tflops,int8_dense_tops,"
        "last_level_cache_mb,tdp_w,boost_mhz,cores,simd,source\n"
        "unheard-of-x1,gpu,16,500,100,25,200,48,200,2000,40 SM,,memory\n"
        "unheard-of-c1,cpu,,80,,2.0,,32,65,5000,8 cores,avx512,memory\n"
    )
    table = DeviceTable(tmp_path)
    card, cpu = table.device("unheard-of-x1", "gpu"), table.device("unheard-of-c1", "cpu")
    assert (card.kind, card.maker, card.declared.compute_units, card.memory_bandwidth) == ("gpu", "nvidia", 40, 500e9)
    assert card.declared.peak_flops_per_s == {"fp32": 25e12, "fp16_acc16": 100e12, "int8": 200e12}
    assert (cpu.kind, cpu.declared.instructions) == ("cpu", ("avx512", "avx2"))
    with pytest.raises(SpecError, match=r"no file or alias names this device, and devices\.csv has no row for it"):
        table.device("unheard-of-x2", "gpu")


CARDS = ("rtx-4090-24gb", "rtx-3060-12gb", "l4-24gb", "rtx-3070-8gb", "a100-sxm-80gb", "rtx-4070-ti-12gb")


def test_a_fit_finds_the_numbers_that_made_the_figures(tmp_path):
    """Figures priced with the committed numbers: of a device that is left out, the fit gives nearly the same again."""
    tests = [{"test": "tg"}, {"test": "tg", "depth": 8000}, {"test": "pp", "num_prompt": 512, "num_generated": 0}]
    plain = {"version": None, "date": datetime.date(2026, 1, 1)}
    asked = [
        Observation("a", timed, {timed.metric: 1.0}, group="g")
        for device in CARDS
        for form in ("Q4_K_M", "F16")
        for test in tests
        for timed in [row(device=device, gguf_type=form, file_size_bytes=0.0, date=plain["date"], **test)]
    ]
    made = [replace(pair.row, metrics=pair.metrics) for pair in predict_rows(asked, tmp_path)]
    shown, hidden = ([each for each in made if (each.setup.device == CARDS[-1]) is is_out] for is_out in (False, True))
    found = fit_backends(shown, tmp_path, "llamacpp", "none")
    again = predict_rows(hidden, tmp_path, fits=found)
    errors = sorted(
        abs(math.log(value / pair.row.metrics[name])) for pair in again for name, value in pair.metrics.items()
    )
    assert load_backends("llamacpp") != found
    assert errors[len(errors) // 2] < 0.05
    assert errors[-1] < 0.2
