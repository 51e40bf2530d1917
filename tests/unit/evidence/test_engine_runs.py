"""Steps that an engine recorded, fitted: steps of other shapes come back, whatever held up a few of them."""

import numpy as np
import pytest

from perfmodel.cost import EngineProfile, step_costs
from perfmodel.cost.calibrations.calibration import Calibration, FamilyFit
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.whole_steps import EngineSteps, fit_engine_steps, read_chunks, shapes_of
from perfmodel.sim.records.columns import StepColumns
from perfmodel.specs import load_scenario

SLOW = {"compute_fraction": 0.3, "memory_fraction": 0.05, "overhead_s": 2e-5, "knee": 1.0}
PROFILE = EngineProfile(engine="vllm")


def recorded(seed, count=400, held_up=0.0):
    """Random steps of the tiny model, as long as a calibration says that the fit does not know."""
    scenario = load_scenario("tiny-llama-cpu", ["engine.profile=vllm"])
    rng = np.random.default_rng(seed)
    zeros = np.zeros(count, dtype=np.int64)
    decodes = rng.integers(1, 17, count)
    chunks = {int(i): [(int(rng.integers(2, 200)), int(rng.integers(0, 300)))] for i in range(0, count, 4)}
    tokens = decodes + np.array([sum(n for n, _ in chunks.get(i, ())) for i in range(count)])
    steps = StepColumns(
        replica=zeros,
        index=np.arange(count),
        num_steps=zeros + 1,
        start_s=np.zeros(count),
        end_s=np.zeros(count),
        first_duration_s=np.zeros(count),
        num_tokens=tokens,
        num_decodes=decodes,
        decode_context=decodes * rng.integers(16, 512, count),
        num_chunks=np.array([len(chunks.get(i, ())) for i in range(count)]),
        **dict.fromkeys(("num_running", "num_waiting", "used_blocks", "num_drafts"), zeros),
        **dict.fromkeys(("num_draft_tokens", "num_accepted_tokens"), zeros),
    )
    run = EngineSteps(scenario, steps, chunks)
    slow = FamilyFit(**SLOW)
    hidden = Calibration(device="cpu", engine="vllm", default=slow, families={"gemm": slow, "attention_decode": slow})
    steps.end_s[:] = seconds(run, hidden)
    steps.end_s[rng.random(count) < held_up] += 0.1
    return run


def seconds(run, calibration):
    cost_model = step_costs(run.scenario, calibration, PROFILE).cost_model()
    return np.array([cost_model.duration_ps(shape) for shape in shapes_of(run)]) / 1e12


def test_other_steps_come_back():
    other = recorded(2, 100)
    found = seconds(other, fit_engine_steps([recorded(1)]).calibration)
    assert found == pytest.approx(other.steps.end_s, rel=0.05)


def test_steps_of_slow_minutes_count_at_the_speed_of_the_others():
    """A run at half speed says the same once it is known to be one."""
    slow = recorded(3)
    slow.steps.end_s[:] *= 2
    other = recorded(2, 100)
    found = seconds(other, fit_engine_steps([recorded(1), slow._replace(speed=0.5)]).calibration)
    assert found == pytest.approx(other.steps.end_s, rel=0.05)


def test_the_pools_middles_are_fitted():
    """Of decodes that recur often, one in twenty held up by 100 ms moves little; each for itself it bends the fit."""
    other = recorded(2, 100)
    decodes = other.steps.num_chunks == 0
    run = recorded(4, 2000, held_up=0.05)
    error = np.abs(seconds(other, fit_engine_steps([run]).calibration)[decodes] / other.steps.end_s[decodes] - 1)
    assert np.median(error) < 0.1


def test_too_few_steps_and_other_files_are_refused(tmp_path):
    with pytest.raises(SpecError, match="got 5 steps in 1 runs"):
        fit_engine_steps([recorded(1, 5)])
    file = tmp_path / "chunks.csv"
    file.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"is no chunks.csv"):
        read_chunks(file)
