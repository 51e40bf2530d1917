"""How near an answer is to what was measured, by an index made up here; and the index that is shipped."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.specs import load_hardware, load_scenario
from perfmodel.trust import MeasuredRow, badge, measured_cells, measured_rows, nearest_rows, setup_of, trust_of
from perfmodel.trust import cells as index
from perfmodel.trust.setups import SIZES

SCENARIO = load_scenario("llama-3.1-8b-a100")
SETUP = setup_of(SCENARIO)


def row(error=0.02, metric="tpot_mean", **changes):
    return MeasuredRow("made up", SETUP._replace(**changes), metric, 10.0 * (1 + error), 10.0, f"{error} {changes}")


@pytest.fixture
def measured(monkeypatch):
    """Sets what the index has."""

    def set_rows(*rows):
        monkeypatch.setattr(badge, "measured_cells", lambda: tuple(index.cells_of(rows)))
        monkeypatch.setattr(badge, "measured_rows", lambda: rows)

    return set_rows


def test_an_answer_like_measured_rows_is_validated_with_their_median_error(measured):
    measured(row(0.01), row(-0.04), row(0.3), row(0.1, "ttft_mean"))
    found = trust_of(SCENARIO)
    assert found.level == "validated"
    assert found.errors["tpot_mean"] == (3, pytest.approx(0.04))
    assert found.errors["ttft_mean"] == (1, pytest.approx(0.1))
    assert "mean TPOT 4.0%" in found.sentence
    assert found.to_json()["rows"] == 3


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
    found = trust_of(SCENARIO)
    assert found.level == "calibrated"
    assert found.errors == {}
    assert [cell.low for cell in found.nearest] == [SETUP._replace(**change)]


def test_rows_that_were_missed_validate_nothing_and_are_named(measured):
    measured(row(0.4), row(-0.5))
    found = trust_of(SCENARIO)
    assert found.level == "calibrated"
    assert "missed by 45%" in found.sentence


@pytest.mark.parametrize(
    ("device", "profile", "level"),
    [
        ("a100-sxm-80gb", "vllm", "calibrated"),
        ("a30", "vllm", "calibrated"),  # kernels of another card of its architecture
        ("b200-sxm", "vllm", "transferred"),  # those of Hopper
        ("xeon-max-9480", "vllm", "transferred"),  # whole runs
        ("a100-sxm-80gb", "datasheet", "datasheet"),
    ],
)
def test_the_level_says_what_is_known_of_kernels(measured, device, profile, level):
    measured()
    changes = [f"engine.profile={profile}", f"hardware={device}"]
    assert trust_of(load_scenario("llama-3.1-8b-a100", changes)).level == level


def test_the_least_known_of_separate_workers_decides(measured):
    measured()
    scenario = load_scenario("llama-3.1-70b-h100-disaggregated")
    prefill, *others = scenario.cluster.pools
    mixed = prefill.model_copy(update={"hardware": load_hardware("b200-sxm")})
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
    found = index.cells_of(rows)
    assert sum(cell.rows for cell in found) == len(rows)
    for cell in found:
        mine = [each for each in rows if each.metric == cell.metric and each.setup.version == cell.low.version]
        assert cell.rows == len(mine)
        assert cell.median_error == pytest.approx(float(np.median([abs(each.error) for each in mine])))
        assert all(cell.low.input_tokens <= each.setup.input_tokens <= cell.high.input_tokens for each in mine)


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    rows = [row(0.02), row(-0.1, input_tokens=77.0), row(0.5, "ttft_mean", separate=True)]
    index.write_index("made-up", rows, tmp_path, lists_rows=True)
    monkeypatch.setattr(index, "data_dir", lambda kind: tmp_path)
    read = index.measured_cells.__wrapped__()
    assert [(cell.metric, cell.rows, cell.low.separate) for cell in read] == [
        (cell.metric, cell.rows, cell.low.separate) for cell in index.cells_of(rows)
    ]
    assert [each.label for each in index.measured_rows.__wrapped__()] == [each.label for each in rows]


def test_rows_that_may_not_be_copied_are_not_written(tmp_path):
    index.write_index("cited", [row(0.02)], tmp_path, lists_rows=False)
    assert [file.name for file in tmp_path.iterdir()] == ["cited.csv"]


def test_the_shipped_index_is_of_known_devices_and_has_its_rows():
    cells, rows = measured_cells(), measured_rows()
    assert len({cell.low.device for cell in cells}) > 20
    assert all((cell.rows > 0 and cell.median_error >= abs(cell.bias) * 0.99) or cell.rows > 1 for cell in cells)
    listed = {each.kind for each in rows}
    assert "serving" not in listed  # cited, not copied
    assert {"steady-state", "throughput", "served"} <= listed
    for kind in listed:
        assert len([each for each in rows if each.kind == kind]) <= sum(
            cell.rows for cell in cells if cell.kind == kind
        )
