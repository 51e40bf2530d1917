"""Results as tables: every kind has columns of equal length, which pandas gets if it is installed."""

import builtins
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.evidence.report import ErrorStats, ValidationReport
from perfmodel.planning.typical_step import estimate_mean_step
from perfmodel.renderable import Renderable, columns_of
from perfmodel.report import terminal as printed

FEW = {"traffic.num_requests": 20}


class DataFrame:
    """Stand-in for pandas: refuses arrays of unequal length or with two dimensions."""

    def __init__(self, data):
        self.data = dict(data)
        assert {array.ndim for array in self.data.values()} == {1}
        assert len({len(array) for array in self.data.values()}) == 1


@pytest.fixture
def pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))


@pytest.fixture(scope="module")
def run():
    return pm.simulate("llama-3.1-8b-a100", FEW)


def test_every_printable_result_has_columns():
    for view in printed._VIEWS.values():
        import_module(f"perfmodel.report.views.{view.partition(':')[0]}")
    direct = [kind for kind in Renderable.__subclasses__() if kind.__module__.startswith("perfmodel")]
    shared = [kind for base in direct for kind in base.__subclasses__()]  # plans have a base in common
    kinds = {kind.__name__: kind for kind in (*direct, *shared) if not kind.__name__.startswith("_")}
    assert set(kinds) == set(printed._VIEWS)
    for kind in kinds.values():
        assert hasattr(kind, "columns"), kind


def test_requests_and_steps_are_the_records(run, pandas):
    requests, steps = run.to_pandas().data, run.to_pandas("steps").data
    assert len(requests["ttft_s"]) == 20
    assert requests["num_output_tokens"].sum() == run.summary["total_output_tokens"]
    assert steps["duration_s"].min() > 0


def test_operators_of_a_step_add_up_to_it(run, pandas):
    """Times and FLOPs add up to those of the step, without host time."""
    report = estimate_mean_step(run)
    for table in (report.to_pandas().data, report.estimate.to_pandas().data):
        assert table["duration_s"].sum() == pytest.approx(report.estimate.device_s)
        assert table["flops"].sum() == pytest.approx(report.estimate.flops)


def test_parts_of_memory_add_up_to_what_is_used(pandas):
    scenario = pm.load_scenario("llama-3.1-8b-a100")
    plan = pm.plan_memory(scenario.model, scenario.hardware, scenario.engine)
    table = plan.to_pandas().data
    assert table["bytes"].sum() <= plan.usable_bytes
    assert table["bytes"].sum() > plan.usable_bytes - plan.block_size * plan.kv_bytes_per_token
    assert table["bytes"][table["part"] == "KV blocks"].sum() == plan.kv_bytes


def test_a_validation_has_a_row_per_group_and_metric(pandas):
    stats = ErrorStats(4, 0.1, 0.2, 0.3, -0.1, None)
    table = ValidationReport("served", 4, 4, {"ttft": stats}, {"h100": {"ttft": stats, "tpot": stats}}).to_pandas().data
    assert table["group"].tolist() == ["all", "h100", "h100"]
    assert table["metric"].tolist() == ["ttft", "ttft", "tpot"]
    assert np.isnan(table["interval_coverage"]).all()


def test_sweeps_and_what_ifs_have_a_row_per_point(pandas):
    axes = {"traffic.arrivals.rate": [1, 4], "engine.max_num_seqs": [8, 64]}
    assert len(pm.sweep("llama-3.1-8b-a100", axes, FEW, "mean_tpot_ms").to_pandas().data["mean_tpot_ms"]) == 4
    result = pm.whatif("llama-3.1-8b-a100", {"hardware.hbm.bandwidth": "0.5x..2x:3"}, FEW, "mean_tpot_ms", workers=1)
    assert result.to_pandas().data["elasticity"][0] < 0


def test_columns_of_rows_keep_numbers_as_numbers_and_gaps_as_nan():
    table = columns_of([{"a": 1, "b": "x", "c": None, "d": [1]}, {"a": 2.5, "b": None, "c": 3}])
    assert list(table) == ["a", "b", "c"]
    assert table["a"].tolist() == [1, 2.5]
    assert table["b"].tolist() == ["x", ""]
    assert np.isnan(table["c"][0])
    assert table["c"][1] == 3
    assert columns_of([]) == {}


def test_without_pandas_the_error_names_the_remedy(run, monkeypatch):
    real = builtins.__import__

    def without(name, *args):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(pm.MissingExtraError, match=r"to_pandas.. needs pandas.*pip install pandas.*columns") as error:
        run.to_pandas()
    assert str(error.value).count(".") <= 2
