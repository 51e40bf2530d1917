"""How near an answer is to what was measured, by an index made up here; and the index that is shipped."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import accuracy_table, left_out_index
from perfmodel.files.catalog import data_dir
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.trust import MeasuredRow, badge, index, measured_cells, measured_rows, nearest_rows, setup_of, trust_of
from perfmodel.trust import index as left_out
from perfmodel.trust.index import SIZES

SCENARIO = load_scenario("llama-3.1-8b-a100")
SETUP = setup_of(SCENARIO)


def row(error=0.02, metric="tpot_mean", **changes):
    return MeasuredRow("made up", SETUP._replace(**changes), metric, 10.0 * (1 + error), 10.0, f"{error} {changes}")


@pytest.fixture
def measured(monkeypatch):
    """Sets what the index has."""

    def set_rows(*rows):
        monkeypatch.setattr(badge, "measured_cells", lambda: tuple(accuracy_table.cells_of(rows)))
        monkeypatch.setattr(badge, "measured_rows", lambda: rows)

    return set_rows


def test_the_badge_counts_rows_like_the_answer(measured):
    """By hand: |errors| of TPOT are 1, 4 and 30 %: the median is 4 %, the 90th percentile 4 + 0.8 x 26 = 24.8 %."""
    measured(row(0.01), row(-0.04), row(0.3), *(row(error, "ttft_mean") for error in (0.1, 0.1, -0.2)))
    trust = trust_of(SCENARIO)
    assert trust.level == "validated"
    assert trust.errors["tpot_mean"] == (3, pytest.approx(0.04), pytest.approx(0.248))
    assert trust.errors["ttft_mean"] == (3, pytest.approx(0.1), pytest.approx(0.18))
    assert trust.badge == "validated; rows like this: TPOT 4 % (p90 25), TTFT 10 % (p90 18), 3 rows"
    data = trust.to_json()
    assert (data["badge"], data["rows"], data["left_out"]) == (trust.badge, 3, None)
    assert str(trust) == f"{trust.badge}. Measured: {SETUP.model} on {SETUP.device} under vllm."


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"engine.enable_lora": True, "traffic.adapters": {"count": 4}}, "LoRA adapters"),
        (
            {
                "engine.speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "acceptance": {"rate": 0.5},
                }
            },
            "speculation",
        ),
        ({"engine.kv_offload": {"capacity_bytes": 10**10}}, "a second tier of KV"),
        ({"engine.runner": "pooling", "traffic.output_tokens": None}, "vectors or scores"),
        ({"cluster.autoscaling": {"metric": "concurrency", "target": 32, "max_replicas": 4}}, "an autoscaler"),
        ({"hardware": "a100-sxm-80gb:3g.40gb"}, "MIG slices"),
        ({"traffic.beam_width": 4}, "beams"),
        ({"traffic.structured_outputs": {"count": 8}}, "answers of a required shape"),
    ],
)
def test_what_no_row_has_is_not_validated_by_rows_without_it(measured, changes, what):
    measured(*(row(error) for error in (0.01, 0.02, 0.03)))
    assert trust_of(SCENARIO).level == "validated"
    trust = trust_of(SCENARIO.with_(changes))
    assert trust.level == "calibrated"
    assert str(trust).endswith(f"No row has {what}.")


def test_without_comparable_rows_the_differing_sizes_are_named(measured):
    """The active parameters of a dense model equal its parameters, so they are not listed again."""
    measured(row(input_tokens=100.0, total_b=1.0, active_b=0.9))
    here = f"{SETUP.input_tokens:,.4g}"
    assert str(trust_of(SCENARIO)).endswith(
        "Kernels of a100-sxm-80gb were measured. The nearest rows (llama-3.1-8b) have 1 billion parameters "
        f"(here 8.03), 100 input tokens (here {here})."
    )


def test_rows_of_an_unknown_load_are_not_the_nearest(measured):
    """Two doublings away in prompts: rows of eight requests in flight stand before those of an overloaded server."""
    closed = SCENARIO.with_({"traffic.arrivals": {"process": "closed_loop", "concurrency": 8}})
    prompts = {"input_tokens": SETUP.input_tokens / 4}
    overloaded = [row(240.0, "ttft_mean", model="another", **prompts)]
    measured(*overloaded, row(0.1, "ttft_mean", concurrency=8.0, **prompts))
    near = trust_of(closed).errors["ttft_mean"].median
    measured(*overloaded)
    assert near < 1.0 < trust_of(closed).errors["ttft_mean"].median
    assert "TTFT over 1,000 % (p90 over 1,000)" in trust_of(closed).badge


def test_sizes_are_printed_as_people_write_them(measured):
    measured(row(devices=1.0, concurrency=500_000.0, input_tokens=123_456.0))
    scenario = load_scenario("llama-3.1-8b-a100", ["engine.tensor_parallel_size=4"])
    text = str(trust_of(scenario))
    assert "have 1 device (here 4), " in text
    assert "123,456 input tokens (here " in text
    assert "e+" not in text


def test_an_unmeasured_family_is_named(measured):
    measured(row(family="dense, state space"))
    assert f"No model of its family ({SETUP.family}) was measured." in str(trust_of(SCENARIO))


def test_rows_without_cpu_offload_do_not_validate_a_setup_with_it(measured):
    whole = load_scenario("qwen3-30b-a3b-rtx-4090")
    shared = load_scenario("qwen3-30b-a3b-rtx-4090", ["engine.n_gpu_layers=20", "engine.cpu=ryzen-9-7950x"])
    rows = [MeasuredRow("made up", setup_of(whole), "decode_tokens_per_s", 10.0, 10.0, "")] * 3
    measured(*rows)
    assert trust_of(whole).left_out is None
    assert trust_of(shared).left_out == "device"


@given(st.lists(st.floats(0, 3), min_size=1, max_size=30), st.sampled_from([0.5, 0.9]))
def test_quantiles_are_numpys(values, share):
    assert index.quantile(values, share) == pytest.approx(float(np.quantile(values, share)))


def test_differing_counts_follow_their_metric(measured):
    measured(*(row(0.01),) * 4, *(row(0.2, "ttft_mean"),) * 3)
    assert trust_of(SCENARIO).figures == "rows like this: TPOT 1 % (p90 1) in 4 rows, TTFT 20 % (p90 20) in 3 rows"


@pytest.mark.parametrize(
    ("errors", "level"),
    [
        ({"tpot_mean": [0.24] * 3}, "validated"),
        ({"tpot_mean": [0.5] * 3}, "calibrated"),
        ({"tpot_mean": [-0.5] * 3}, "calibrated"),
        ({"tpot_mean": [0.01] * 3, "ttft_mean": [0.5] * 3}, "calibrated"),  # every printed figure counts
        ({"e2el_mean": [0.5] * 3}, "calibrated"),
        ({"tpot_mean": [0.01] * 2}, "calibrated"),  # too few rows
    ],
    ids=str,
)
def test_validated_requires_small_errors_in_enough_rows(measured, errors, level):
    measured(*(row(error, metric) for metric, values in errors.items() for error in values))
    trust = trust_of(SCENARIO)
    assert trust.level == level
    assert trust.figures.startswith("rows like this: ")  # measured errors are never replaced by expected ones


def test_rows_of_the_model_take_precedence_over_its_family(measured):
    measured(*(row(0.01, model="a sibling"),) * 9, *(row(0.9),) * 3)
    trust = trust_of(SCENARIO)
    assert trust.errors["tpot_mean"] == (3, pytest.approx(0.9), pytest.approx(0.9))
    assert trust.level == "calibrated"


@pytest.mark.parametrize(
    "change",
    [
        {"device": "h100-sxm-80gb"},
        {"engine": "sglang"},
        {"weights": "fp8"},
        {"family": "mixture of experts, attention"},
        {"separate": True},
        *({size: 2.1 * getattr(SETUP, size)} for size in SIZES if getattr(SETUP, size)),
        *({size: getattr(SETUP, size) / 2.1} for size in SIZES if getattr(SETUP, size)),
    ],
    ids=str,
)
def test_rows_of_something_else_validate_nothing(measured, change):
    measured(row(0.01, **change))
    trust = trust_of(SCENARIO)
    assert trust.level == "calibrated"
    assert trust.figures.startswith("no rows like this: expect TPOT ")
    assert all(figures.rows == 0 for figures in trust.errors.values())
    assert [cell.low for cell in trust.nearest] == [SETUP._replace(**change)]


@pytest.mark.parametrize("error", [0.02, 0.5])
@pytest.mark.parametrize(
    "change", [{"input_tokens": 9e4}, {"weights": "fp8"}, {"model": "x", "family": "x"}, {"engine": "sglang"}], ids=str
)
def test_expected_errors_do_not_shrink_with_distance(measured, change, error):
    """The errors of the nearest rows are a lower bound for a setup further away."""
    measured(*(row(error, **change),) * 3)
    far = trust_of(SCENARIO)
    measured(*(row(error),) * 3)
    near = trust_of(SCENARIO)
    assert far.errors["tpot_mean"].median >= near.errors["tpot_mean"].median
    assert far.errors["tpot_mean"].p90 >= near.errors["tpot_mean"].p90


@pytest.mark.parametrize("devices", ["gpu", "cpu", "apple", "apu"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp", "mlx", "datasheet"])
def test_expected_errors_do_not_shrink_with_more_left_out(engine, devices):
    expected = [left_out.left_out_errors(engine, devices, cut) for cut in left_out.CUTS]
    for nearer, further in pairwise(expected):
        assert nearer.keys() <= further.keys()
        for metric, (median, p90) in nearer.items():
            assert median <= further[metric][0]
            assert p90 <= further[metric][1]
    assert all(expected), "an answer without rows like it says what to expect, whatever was left out"


def test_expected_errors_come_from_the_matching_cross_validation(measured):
    """With rows of another model on the device, the model is unseen; without rows, the device; without kernels of its
    architecture, the architecture. An engine without a cross-validation takes the largest errors of all engines."""
    measured(row(0.01, model="another", input_tokens=9e4))
    assert trust_of(SCENARIO).left_out == "model"
    measured(row(0.01, input_tokens=9e4))
    assert trust_of(SCENARIO).left_out == "cell"
    measured()
    trust = trust_of(SCENARIO)
    assert trust.left_out == "device"
    median, p90 = left_out.left_out_errors("vllm", "gpu", "device")["tpot_mean"]
    assert trust.errors["tpot_mean"] == (0, median, p90)
    assert trust_of(load_scenario("llama-3.1-8b-a100", ["hardware=xeon-max-9480"])).left_out == "architecture"
    unknown = left_out.left_out_errors("an engine", "gpu", "device")["tpot_mean"]
    by_engine = [left_out.left_out_errors(name, "gpu", "device")["tpot_mean"] for name in ("vllm", "sglang", "trtllm")]
    assert unknown == tuple(max(errors) for errors in zip(*by_engine, strict=True))


def test_left_out_errors_equal_those_of_the_reports():
    file = data_dir("validated") / "left_out" / "errors.csv"
    assert file.read_text(encoding="utf-8") == left_out_index.left_out_table()
    lines = left_out.measured_left_out()
    assert {line.left_out for line in lines} == set(left_out.CUTS)
    assert all((data_dir("reports") / line.report).is_file() and 0 < line.median <= line.p90 for line in lines)


@pytest.mark.parametrize(
    ("device", "profile", "level"),
    [
        ("a100-sxm-80gb", "vllm", "calibrated"),
        ("a30", "vllm", "calibrated"),  # kernels of another card of its architecture
        ("t4", "vllm", "transferred"),  # those of Ampere
        ("xeon-max-9480", "vllm", "transferred"),  # whole runs
        ("a100-sxm-80gb", "datasheet", "datasheet"),
    ],
)
def test_the_level_says_what_is_known_of_kernels(measured, device, profile, level):
    measured()
    changes = [f"engine.profile={profile}", f"hardware={device}", "engine.dtype=float16"]
    assert trust_of(load_scenario("llama-3.1-8b-a100", changes)).level == level


def test_the_least_known_of_separate_workers_decides(measured):
    measured()
    scenario = load_scenario("llama-3.1-70b-h100-disaggregated")
    prefill, *others = scenario.cluster.pools
    mixed = prefill.model_copy(update={"hardware": load_hardware("t4")})
    cluster = scenario.cluster.model_copy(update={"pools": (mixed, *others)})
    assert trust_of(scenario).level == "calibrated"
    assert trust_of(scenario.model_copy(update={"cluster": cluster})).level == "transferred"


def test_nearest_rows_are_those_of_the_nearest_sizes(measured):
    sizes = [100.0, 400.0, 1600.0, 6400.0]
    measured(*(row(0.01, input_tokens=size) for size in sizes), row(0.01, device="h100-sxm-80gb"))
    asked = SCENARIO.traffic.input_tokens.model_copy(update={"mean": 1600.0, "p99": 4000.0, "std": None})
    traffic = SCENARIO.traffic.model_copy(update={"input_tokens": asked})
    found = nearest_rows(trust_of(SCENARIO.model_copy(update={"traffic": traffic})))
    assert found[0].setup.input_tokens == 1600.0
    assert all(each.setup.device == SETUP.device for each in found)


ROWS = st.lists(
    st.builds(
        lambda error, metric, tokens, version: row(error, metric, input_tokens=tokens, version=version),
        st.floats(-0.9, 2.0),
        st.sampled_from(["tpot_mean", "ttft_mean"]),
        st.floats(1, 1e5),
        st.sampled_from(["0.11", "0.12"]),
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS)
def test_cells_have_every_row_once_and_its_setup_between_their_ends(rows):
    found = accuracy_table.cells_of(rows)
    assert sum(cell.rows for cell in found) == len(rows)
    for cell in found:
        mine = [each for each in rows if each.metric == cell.metric and each.setup.version == cell.low.version]
        assert cell.rows == len(mine)
        assert cell.median_error == pytest.approx(float(np.median([abs(each.error) for each in mine])))
        assert all(cell.low.input_tokens <= each.setup.input_tokens <= cell.high.input_tokens for each in mine)


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    rows = [row(0.02), row(-0.1, input_tokens=77.0), row(0.5, "ttft_mean", separate=True)]
    accuracy_table.write_index("made-up", rows, tmp_path, lists_rows=True)
    monkeypatch.setattr(index, "data_dir", lambda kind: tmp_path)
    read = index.measured_cells.__wrapped__()
    assert [(cell.metric, cell.rows, cell.low.separate) for cell in read] == [
        (cell.metric, cell.rows, cell.low.separate) for cell in accuracy_table.cells_of(rows)
    ]
    assert [each.label for each in index.measured_rows.__wrapped__()] == [each.label for each in rows]


def test_rows_that_may_not_be_copied_are_not_written(tmp_path):
    accuracy_table.write_index("cited", [row(0.02)], tmp_path, lists_rows=False)
    assert [file.name for file in tmp_path.iterdir()] == ["cited.csv"]


def test_the_shipped_index_is_of_known_devices_and_has_its_rows():
    cells, rows = measured_cells(), measured_rows()
    assert len({cell.low.device for cell in cells}) > 20
    assert all(cell.errors and list(cell.errors) == sorted(cell.errors) and cell.errors[0] >= -1 for cell in cells)
    listed = {each.kind for each in rows}
    assert "serving" not in listed  # cited, not copied
    assert {"steady-state", "throughput", "served"} <= listed
    for kind in listed:
        assert len([each for each in rows if each.kind == kind]) <= sum(
            cell.rows for cell in cells if cell.kind == kind
        )


def test_errors_of_shipped_cells_are_those_of_their_rows():
    """Recomputed from predicted and measured values; repeated setups are listed once, by their median."""
    by_cell = {
        (cell.kind, cell.metric, cell.low._replace(**dict.fromkeys(SIZES, 0.0))): cell for cell in measured_cells()
    }
    recounted = accuracy_table.cells_of(measured_rows())
    num_complete = 0
    for cell in recounted:
        shipped = by_cell[cell.kind, cell.metric, cell.low._replace(**dict.fromkeys(SIZES, 0.0))]
        assert cell.rows <= shipped.rows
        if cell.rows == shipped.rows:
            num_complete += 1
            assert cell.errors == pytest.approx(shipped.errors, rel=6e-3, abs=1e-4)
    assert num_complete > 0.3 * len(recounted)


def test_both_floats_of_16_bits_are_one_format() -> None:
    assert badge._is_alike("fp16", "bf16")
    assert badge._is_alike("fp8", "fp8")
    assert not badge._is_alike("fp8", "bf16")
    assert not badge._is_alike("int8", "fp8")
