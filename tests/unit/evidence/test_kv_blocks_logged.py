"""KV blocks as planned beside those that recorded servers logged, for every run that says them."""

from pathlib import Path

import pytest

from perfmodel.cost import plan_memory
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.sources.recorded import read_serving_runs
from perfmodel.models.spec import ModelSpec

RUNS = Path(__file__).resolve().parents[4] / "shared" / "truth" / "serving" / "vllm_runs.json"


def logged_runs() -> list[Observation]:
    runs = read_serving_runs(RUNS)[0] if RUNS.exists() else []
    return [run for run in runs if run.scenario.engine.num_gpu_blocks_override is not None]


def planned_beside_logged(run: Observation) -> float:
    engine = run.scenario.engine
    free = engine.model_copy(update={"num_gpu_blocks_override": None})
    assert engine.num_gpu_blocks_override is not None
    planned = plan_memory(run.scenario.model, run.scenario.hardware, free).num_kv_blocks
    return planned / engine.num_gpu_blocks_override - 1


def has_encoder(model: ModelSpec) -> bool:
    return model.extra_params > 0


def test_plans_of_text_models_are_within_two_per_cent_of_what_servers_logged() -> None:
    """Weights, the profiling run's peak, the rotary table, buffers: what vLLM subtracts before it counts blocks."""
    if not RUNS.exists():
        pytest.skip("the recorded runs are not beside this checkout")
    runs = [run for run in logged_runs() if not has_encoder(run.scenario.model)]
    assert len(runs) >= 3
    for run in runs:
        assert abs(planned_beside_logged(run)) < 0.02, run.name


def test_plans_of_multimodal_models_are_within_ten_per_cent_of_what_servers_logged() -> None:
    """Llama-4 Scout: a rotary table of ten million positions takes 2.7 GB of each device."""
    if not RUNS.exists():
        pytest.skip("the recorded runs are not beside this checkout")
    runs = [run for run in logged_runs() if has_encoder(run.scenario.model)]
    assert runs
    for run in runs:
        assert abs(planned_beside_logged(run)) < 0.10, run.name
