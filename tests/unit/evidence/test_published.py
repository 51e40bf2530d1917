"""`validate published`: closed forms, ratios, what a report says; and the files in workloads/scenarios/published."""

import pytest
from published_figures import IN_ONE_WORKER, PUBLISHED, published_report

from perfmodel.errors import SpecError
from perfmodel.evidence.kinds.published import predict, validate_published
from perfmodel.evidence.kinds.published_block import factor_of_unit
from perfmodel.planning.points import highest
from perfmodel.specs import load_hardware, load_scenario

pytestmark = IN_ONE_WORKER


def predicted(folder, block, head="hardware: a100-sxm-80gb\n"):
    file = folder / "figure.yaml"
    file.write_text(f"{head}published: {{source: by hand, {block}}}\n")
    return predict(load_scenario(file), file)[0]


def test_a_roofline_by_hand(tmp_path):
    """(m, k) x (k, n) in fp16: 2 m n k FLOPs at the peak, 2 (n k + m k + m n) bytes at the bandwidth."""
    device = load_hardware("a100-sxm-80gb")
    bandwidth, peak = device.memory_bandwidth, device.declared.peak_flops_per_s["fp16"]
    block = "metric: roofline_us, value: 1, unit: us, kernel: {operator: gemm, m: %d, n: 4096, k: 4096, format: fp16}"
    few = 2 * (4096 * 4096 + 2 * 4096) / bandwidth
    assert predicted(tmp_path, block % 1) == pytest.approx(few * 1e6)
    many = 2 * 8192 * 4096 * 4096 / peak
    assert predicted(tmp_path, block % 8192) == pytest.approx(many * 1e6)


def test_int4_weights_are_a_quarter_and_their_scales(tmp_path):
    """Of large weights and one row: 2 bytes over (4 + 16/128) / 8 bytes, activations aside. Source: Marlin's ideal."""
    block = (
        "metric: roofline_us, value: 3.87, unit: x, baseline: [published.kernel.format=fp16], "
        "kernel: {operator: gemm, m: 1, n: 18432, k: 73728, format: w4a16}"
    )
    assert predicted(tmp_path, block) == pytest.approx(2 / 0.515625, rel=1e-3)


def test_kv_of_a_sequence_by_hand(tmp_path):
    """Llama-2-13B in 16 bits: 2 (K, V) x 40 layers x 5120 x 2 bytes = 819,200 B per token, however it is sharded."""
    head = "model: llama-2-13b\nhardware: a100-sxm-40gb\nengine: {tensor_parallel_size: 8}\n"
    block = "metric: kv_gb, value: 1.7, unit: GB, step: {batch: 1, context: 2048}"
    assert predicted(tmp_path, block, head) == pytest.approx(819_200 * 2048 / 1e9)


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    [("speedup", 2), ("gain", 1), ("saving", 0.5), ("scenario_over_baseline", 0.5), ("baseline_over_scenario", 2)],
)
def test_which_way_round_a_ratio_is(tmp_path, ratio, wanted):
    """KV in 8 bits is half of that in 16: less is better."""
    head = "model: llama-2-7b\nhardware: h100-sxm-80gb\nengine: {kv_cache_dtype: fp8}\n"
    block = f"metric: kv_bytes_per_token, value: 1, baseline: engine.kv_cache_dtype=auto, ratio: {ratio}"
    assert predicted(tmp_path, block, head) == pytest.approx(wanted)


def test_more_tokens_per_second_are_a_speedup(tmp_path):
    head = "model: llama-2-7b\nhardware: a100-sxm-80gb\n"
    step = "step: {batch: 1, context: 128}, baseline: [hardware.hbm.bandwidth=0.5x]"
    faster = predicted(tmp_path, f"metric: tokens_per_s, value: 2, unit: x, {step}", head)
    shorter = predicted(tmp_path, f"metric: step_ms, value: 2, unit: x, {step}", head)
    assert faster == pytest.approx(shorter)
    assert 1.5 < faster <= 2


def test_operators_by_name_by_family_and_by_mistake(tmp_path):
    head = "model: llama-2-7b\nhardware: a100-sxm-80gb\n"
    block = "metric: time_us, value: 1, unit: us, step: {prefill: 512}, operator: %s"
    parts = [predicted(tmp_path, block % name, head) for name in ("qkv_proj", "o_proj")]
    assert predicted(tmp_path, block % "[qkv_proj, o_proj]", head) == pytest.approx(sum(parts))
    assert predicted(tmp_path, block % "gemm", head) > sum(parts)
    with pytest.raises(SpecError, match=r"got 'qkv', this step has .* Did you mean 'qkv_proj'"):
        predicted(tmp_path, block % "qkv", head)


def test_without_splits_few_long_contexts_take_longer(tmp_path):
    """One block streams each KV head's whole context: 4 of 108 compute units busy, instead of all."""
    block = (
        "metric: time_us, value: 8, unit: x, baseline: engine.split_kv=false, "
        "kernel: {operator: attention_decode, batch: 2, context: 32768, heads: 16, kv_heads: 2, head_dim: 128}"
    )
    assert predicted(tmp_path, block) > 4


@pytest.mark.parametrize("start", [0.01, 1, 7.3, 500])
def test_the_highest_rate_is_found_from_below_and_above(start):
    assert highest(lambda rate: rate <= 7.3, start) == pytest.approx(7.3, rel=0.021)
    assert highest(lambda rate: False, start) is None


def test_a_capacity_needs_an_slo_and_one_server_serves_no_more_than_it_can(tmp_path):
    """Prompts of one block, alone in a closed form: a server that takes s seconds a request serves at most 1 / s."""
    head = (
        "model: llama-2-7b\nhardware: a100-sxm-80gb\nengine: {max_num_seqs: 1, batching: none}\n%s"
        "traffic: {arrivals: {process: constant, rate: 0.1}, num_requests: 40, "
        "input_tokens: {distribution: fixed, value: 16}, output_tokens: {distribution: fixed, value: 64}}\n"
    )
    with pytest.raises(SpecError, match="max_request_rate needs an `slo`"):
        predicted(tmp_path, "metric: max_request_rate, value: 1, unit: req/s", head % "")
    alone = predicted(tmp_path, "metric: mean_e2el_ms, value: 1, unit: s", head % "")
    found = predicted(tmp_path, "metric: max_request_rate, value: 1, unit: req/s", head % "slo: {e2el_ms: 1000}\n")
    assert 0.9 / alone < found < 1.3 / alone  # a queue of 40 grows slowly just above the capacity


def test_the_nearer_end_of_a_range_counts(tmp_path):
    block = "metric: kv_bytes_per_token, value: %s, unit: KB/token, source: by hand"
    for name, value in (("inside", "[500, 600]"), ("below", "[1000, 2000]")):
        text = f"model: llama-2-7b\nhardware: a10\npublished: {{{block % value}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    figures = {row["id"]: row for row in validate_published(tmp_path).figures}
    assert figures["inside"]["ratio"] == 1
    assert figures["below"]["published"] == 1000


def test_what_cannot_be_predicted_is_listed(tmp_path):
    (tmp_path / "good.yaml").write_text(
        "model: llama-2-7b\nhardware: a10\npublished: {metric: weight_gb, value: 13.5, unit: GB, source: x}\n"
    )
    (tmp_path / "bad.yaml").write_text("model: llama-2-7b\nhardware: a10\npublished: {metric: weight}\n")
    report = validate_published(tmp_path)
    assert (report.rows, report.covered) == (2, 1)
    assert "bad.yaml:3: published" in report.notes[0]
    document = report.to_json()
    assert document["kind"] == "published"
    assert document["metrics"]["memory"]["rows"] == 1
    assert document["figures"][0]["ratio"] == pytest.approx(1, rel=0.02)
    with pytest.raises(SpecError, match="published"):
        validate_published(tmp_path / "bad.yaml")


@pytest.fixture(scope="module")
def report():
    return published_report()


@pytest.mark.release
def test_every_published_figure_loads_and_is_predicted(report):
    assert report.covered == report.rows >= 60
    assert all(row["source"] and row["predicted"] > 0 for row in report.figures)
    assert all(row["id"] == row["file"].removesuffix(".yaml") for row in report.figures)


def test_a_figure_that_is_off_says_why(report):
    """A miss stays, and its file gives the reason: half as much again, or half of what was published."""
    off = [row["file"] for row in report.figures if not 0.5 < row["ratio"] < 1.5]
    assert not [name for name in off if load_scenario(PUBLISHED / name).published.note == ""]


@pytest.mark.parametrize(("metric", "unit", "wanted"), [("time_us", "us", 881.2), ("tflops", "TFLOP/s", 312.0)])
def test_the_simplest_prediction_of_a_kernel_is_what_the_datasheets_peak_gives(tmp_path, metric, unit, wanted):
    """2 * 8,192 * 4,096 * 4,096 FLOPs at 312 TFLOP/s are 881 us."""
    file = tmp_path / "figure.yaml"
    kernel = "{operator: gemm, m: 8192, n: 4096, k: 4096, format: fp16}"
    block = f"id: a, technique: x, metric: {metric}, value: 1, unit: {unit}, kernel: {kernel}"
    file.write_text(f"hardware: a100-sxm-80gb\npublished: {{source: by hand, {block}}}\n")
    (comparison,) = validate_published(file).comparisons
    assert comparison.rows.trivial == pytest.approx([wanted], rel=1e-3)


@pytest.mark.parametrize(
    ("unit", "dimension", "factor"),
    [
        ("B", "bytes", 1),
        ("kB", "bytes", 1e3),
        ("KiB", "bytes", 1024),
        ("MB", "bytes", 1e6),
        ("MiB", "bytes", 1024**2),
        ("GiB", "bytes", 1024**3),
        ("TiB", "bytes", 1024**4),
        ("TB", "GB", 1e3),
        ("GiB", "GB", 1.073741824),
        ("TB/s", "GB/s", 1e3),
        ("KB/token", "bytes", 1e3),
        ("MB/token", "bytes", 1e6),
        ("s", "ms", 1e3),
        ("min", "s", 60),
        ("h", "s", 3600),
        ("ms", "us", 1e3),
        ("ns", "us", 1e-3),
        ("PFLOP/s", "TFLOP/s", 1e3),
        ("GFLOPS", "TFLOP/s", 1e-3),
        ("ktok/s", "tokens/s", 1e3),
        ("tokens/s/GPU", "tokens/s", 1),
        ("req/min", "requests/s", 1 / 60),
        ("%", "fraction", 0.01),
        ("x (faster)", "times", 1),
        ("Wh", "J", 3600),
        ("kJ", "J", 1e3),
        ("sequences", "count", 1),
    ],
)
def test_a_unit_is_so_much_of_the_metrics_own(unit: str, dimension: str, factor: float) -> None:
    assert factor_of_unit(unit, dimension, "a metric") == pytest.approx(factor)
