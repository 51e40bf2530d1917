"""Scenarios of the suite, served for real by the engine: every request and every step is kept; and pairs: a scenario
served with a technique and without. On a CPU both are small enough for one core."""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from perfmodel.engine import Backend, Outcome, StepPlan
from perfmodel.errors import SpecError
from perfmodel.evidence.executed.technique import Technique
from perfmodel.evidence.sources.measured import SIDES
from perfmodel.files.blocks import block_as
from perfmodel.files.catalog import data_dir
from perfmodel.sim import RunResult
from perfmodel.sim.replica.backend import shape_of
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario
from perfmodel_executors.engines.run import execute_on
from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.run import execute_scenario

SCENARIOS = (
    *("mixed", "decode-heavy", "prefill-heavy", "moe", "int4-weights", "fp8-kv", "speculation", "long-context"),
    *("int8-weights", "int8-kv", "fp8-weights"),
)
PAIRS = (
    *("int4-weights", "fp8-kv", "continuous-batching", "chunked-prefill", "prefix-cache", "fp8-weights"),
    *("grouped-query", "int8-weights", "int8-kv", "speculation-quantized-self", "flash-attention", "cuda-graphs"),
)
# On a CPU: the same traffic by shape, of a model and of lengths that one core gets through.
_SMALL = {
    "decode-heavy": (24, (16, 48), (32, 96)),
    "fp8-weights": (10, (32, 192), (8, 24)),
    **dict.fromkeys(("fp8-kv", "int8-kv"), (8, (256, 768), (16, 32))),
    **dict.fromkeys(("int4-weights", "int8-weights"), (16, (32, 192), (16, 48))),
    "long-context": (6, (256, 768), (16, 32)),
    "mixed": (30, (32, 256), (16, 64)),
    "moe": (20, (32, 192), (16, 48)),
    "prefill-heavy": (20, (128, 512), (4, 12)),
    "speculation": (8, (32, 128), (16, 48)),
}
_FOLDERS = {"cuda": "executor/pairs", "cpu": "techniques"}
_GUESS_S = {"cuda": 30.0, "cpu": 15.0}
_PAIR_GUESS_S = {"cuda": 25.0, "cpu": 8.0}
_VLLM_GUESS_S = 90.0  # it compiles and captures at its start
_PLAIN_FIELDS = 6  # of a BatchShape, without drafts and other ranks
_NS = 9  # digits of a second
_PS_PER_S = 1e12
_COLUMNS = ("arrival_s", "ttft_s", "tpot_s", "e2el_s", "num_prompt_tokens", "num_output_tokens")


class _Recorder:
    def __init__(self) -> None:
        self.shapes: list[tuple[Any, ...]] = []
        self.seconds: list[float] = []

    def around(self, backend: Backend, _: Scenario) -> Backend:
        self._backend = backend
        return self

    def execute(self, plan: StepPlan) -> Outcome:
        outcome = self._backend.execute(plan)
        shape = tuple(shape_of(plan))
        self.shapes.append(shape if plan.draft_depths else shape[:_PLAIN_FIELDS])
        self.seconds.append(outcome.duration / _PS_PER_S)
        return outcome


def serving_tasks(bench: Bench) -> Iterator[Task]:
    kind = bench.device.type
    for rank, name in enumerate(SCENARIOS):
        overrides = [f"hardware={bench.hardware.name}", *(_small(name) if kind == "cpu" else ())]
        yield Task("serving", name, partial(serve, f"executor/{name}", overrides, bench), rank, _GUESS_S[kind])


def _small(name: str) -> Iterator[str]:
    requests, (least_in, most_in), (least_out, most_out) = _SMALL[name]
    yield f"model={'tiny-moe' if name == 'moe' else 'tiny-llama'}"
    yield "engine.num_gpu_blocks_override=1024"
    yield "engine.max_model_len=2048"
    yield f"traffic.num_requests={requests}"
    yield f"traffic.input_tokens={{distribution: uniform, low: {least_in}, high: {most_in}}}"
    yield f"traffic.output_tokens={{distribution: uniform, low: {least_out}, high: {most_out}}}"


def vllm_tasks(bench: Bench) -> Iterator[Task]:
    """The scenarios on the vLLM of this environment, where there is one, behind all else that is measured."""
    if bench.device.type != "cuda" or find_spec("vllm") is None:
        return
    for rank, name in enumerate(SCENARIOS):
        yield Task("vllm", name, partial(serve_on_vllm, f"executor/{name}", bench), rank, _VLLM_GUESS_S, limit_s=400.0)


def serve_on_vllm(name: str, bench: Bench) -> dict[str, Any]:
    """A ServingRecord of the named scenario on vLLM, whose steps are not told apart."""
    engine = ("engine.profile=vllm", f"engine.version={version('vllm')}")
    overrides = [f"hardware={bench.hardware.name}", *engine]
    scenario = load_scenario(name, overrides)
    bench.release_memory()
    return _record(name, overrides, execute_on("vllm", scenario, scenario.model.name), _Recorder())


def pair_tasks(bench: Bench) -> Iterator[Task]:
    kind, folder = bench.device.type, data_dir("scenarios")
    files = [folder / _FOLDERS[kind] / f"{name}.yaml" for name in PAIRS]
    for rank, file in enumerate(file for file in files if file.is_file()):
        name = file.relative_to(folder).with_suffix("").as_posix()
        for side, overrides in zip(SIDES, sides_of(name), strict=True):
            run = partial(serve, name, [f"hardware={bench.hardware.name}", *overrides], bench)
            yield Task("pairs", f"{file.stem} {side}", run, rank, _PAIR_GUESS_S[kind], file.stem)


def sides_of(name: str) -> tuple[Sequence[str], Sequence[str]]:
    technique = block_as(load_scenario(name).technique, Technique)
    if technique is None:
        raise SpecError(f"{name}: has no `technique` block; give its name, baseline and metric.")
    return (), technique.baseline


def serve(name: str, overrides: Sequence[str], bench: Bench) -> dict[str, Any]:
    """A ServingRecord of the named scenario; where tokens are drafted, with the acceptance that was measured."""
    scenario, recorder = load_scenario(name, overrides), _Recorder()
    bench.release_memory()
    result = execute_scenario(scenario, kernels=bench.backend, wrap=recorder.around, drift=bench.drift)
    config = result.scenario.engine.speculative_config
    if config is not None and config.acceptance is not None:
        acceptance = config.acceptance.model_dump_json(exclude_none=True)
        overrides = [*overrides, f"engine.speculative_config.acceptance={acceptance}"]
    return _record(name, overrides, result, recorder)


def _record(name: str, overrides: Sequence[str], result: RunResult, recorder: _Recorder) -> dict[str, Any]:
    columns = {key: getattr(result.requests, key) for key in _COLUMNS}
    return {
        "scenario": name,
        "overrides": list(overrides),
        "requests": {key: [round(float(value), _NS) for value in column] for key, column in columns.items()},
        "steps": {"shapes": recorder.shapes, "seconds": recorder.seconds},
        "summary": {key: value for key, value in result.summary.items() if isinstance(value, int | float)},
    }
