"""The `published` block of a scenario: what it may say, its units, and its one-sentence errors."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence.kinds.published_block import factor_of_unit
from perfmodel.specs import load_scenario, scenario_schema

STEP = """\
model: llama-2-7b
hardware: a100-sxm-80gb
published:
  metric: {metric}
  value: {value}
  unit: {unit}
  source: a paper
  {more}
"""
DECODE = "step: {batch: 1, context: 128}"
GEMM = "kernel: {operator: gemm, m: 16, n: 4096, k: 4096}"


def write(folder, more=DECODE, metric="step_ms", value="10", unit="ms"):
    file = folder / "figure.yaml"
    file.write_text(STEP.format(metric=metric, value=value, unit=unit, more=more))
    return file


def test_a_step_needs_no_traffic_and_a_kernel_no_model(tmp_path):
    figure = load_scenario(write(tmp_path)).published
    assert (figure.basis, figure.family, figure.value) == ("step", "steps", 10)
    file = tmp_path / "kernel.yaml"
    file.write_text(f"hardware: a10\npublished: {{metric: time_us, value: 3.2 ms, source: a blog, {GEMM}}}\n")
    figure = load_scenario(file).published
    assert (figure.basis, figure.unit, figure.factor) == ("kernel", "ms", pytest.approx(1e3))


def test_a_run_needs_its_traffic_as_any_scenario(tmp_path):
    with pytest.raises(SpecError, match="traffic: is missing"):
        load_scenario(write(tmp_path, more="", metric="mean_ttft_ms"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"unit": "GB/s"}, r"unit: got 'GB/s', step_ms is given in ms, s, us"),
        ({"metric": "tokens_per_sec"}, r"got 'tokens_per_sec'; of a step expected .* Did you mean 'tokens_per_s'"),
        ({"metric": "time_us", "unit": "us"}, r"time_us is of an operator of a step, this figure is of a step"),
        ({"metric": "mean_ttft_ms"}, r"mean_ttft_ms is of a whole run, this figure is of a step; leave step"),
        ({"more": "step: {batch: 1}"}, r"`batch` and `context` go together"),
        ({"more": "step: {batsh: 1}"}, r"unknown key 'batsh'. Did you mean 'batch'"),
        ({"more": f"{DECODE}\n  ratio: gain"}, r"got ratio without baseline"),
        ({"more": f"{DECODE}\n  {GEMM}"}, r"got kernel beside step or operator"),
        ({"more": "operator: gemm"}, r"got operator without step"),
        (
            {"more": "kernel: {operator: gemm, m: 1}", "metric": "time_us"},
            r"gemm needs n, k \(it takes m, n, k, format",
        ),
        ({"more": GEMM.replace("m: 16", "m: 16, heads: 8"), "metric": "time_us"}, r"gemm has no heads; remove it"),
        ({"metric": "kv_gb", "unit": "GB", "more": "id: x"}, r"kv_gb needs `step: \{batch: ..., context: ...\}`"),
        ({"value": "-3"}, r"value: expected a number above 0"),
        ({"value": "[5, 2]"}, r"value: expected a number above 0"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(tmp_path, changes, sentence):
    file = write(tmp_path, **changes)
    with pytest.raises(SpecError, match=sentence) as caught:
        load_scenario(file)
    assert str(caught.value).startswith(f"{file}:")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("unit", "dimension", "factor"),
    [
        ("s", "ms", 1e3),
        ("us", "ms", 1e-3),
        ("ms (read from a plot)", "us", 1e3),
        ("tok/s", "tokens/s", 1),
        ("ktok/s", "tokens/s", 1e3),
        ("tok/s/GPU", "tokens/s", 1),
        ("req/min", "requests/s", 1 / 60),
        ("PFLOP/s", "TFLOP/s", 1e3),
        ("TFLOPS", "TFLOP/s", 1),
        ("TB/s", "GB/s", 1e3),
        ("GiB", "GB", 1.073741824),
        ("KB/token", "bytes", 1e3),
        ("%", "fraction", 0.01),
        ("x", "times", 1),
        ("", "times", 1),
    ],
)
def test_units_become_the_metrics_own(unit, dimension, factor):
    assert factor_of_unit(unit, dimension, "metric") == pytest.approx(factor)


def test_editors_are_told_of_the_block():
    schema = scenario_schema()
    assert "published" in schema["properties"]
    assert schema["then"] == {"required": ["hardware"]}
    assert schema["else"] == {"required": ["model", "hardware", "traffic"]}
