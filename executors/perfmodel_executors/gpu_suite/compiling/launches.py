"""Which kernels the parts of the suite launch, every candidate of the tuner included: recorded without a device."""

__all__ = ["launches_of"]

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from perfmodel.calibrate.measured.host import steps_scenario
from perfmodel.errors import PerfmodelError
from perfmodel.ops.work import BatchShape
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario
from perfmodel_executors.compiled.build import device_limits
from perfmodel_executors.compiled.step import META, record_step
from perfmodel_executors.gpu_suite.parts.pairs import PAIRS, sides_of
from perfmodel_executors.gpu_suite.parts.serving import SCENARIOS
from perfmodel_executors.gpu_suite.parts.smoke import SERVED, dtypes_of, served_scenario
from perfmodel_executors.gpu_suite.parts.steps import DECODES, MODELS, PROMPTS
from perfmodel_executors.gpu_suite.task import Bench
from perfmodel_executors.graphs import capture_sizes
from perfmodel_executors.kernels.dispatch import KERNELS, load_kernels
from perfmodel_executors.kernels.launch import Launch, recording
from perfmodel_executors.kernels.problem import Inputs, problems_of
from perfmodel_executors.kernels.tiles import listing, targeting
from perfmodel_executors.models.decoder import load_decoder

_CHUNKS = (24, 48, 100, 200, 400, 800, 1600, 3200, 6400)  # tokens of a served step: one of each tuned range
_CONTEXT = 2048
_SMOKED = 48  # tokens of a prompt


def launches_of(part: str, hardware: HardwareSpec) -> list[Launch]:
    """Launches of a part on `hardware`, about in the order in which they are needed; of the smoke, which tunes nothing,
    the first candidates alone."""
    with targeting(device_limits(hardware)), recording() as launches, torch.inference_mode():
        if part == "smoke":
            _smoke(hardware)
            return launches
        with listing():
            _RECORDED[part](hardware)
    return launches


def _smoke(hardware: HardwareSpec) -> None:
    bench = Bench(torch.device("cuda"), hardware, "triton")
    for dtype in dtypes_of(bench).values():
        _problems("tiny", dtype)
    for model, overrides in SERVED:
        scenario = served_scenario(model, overrides, bench)
        _steps(scenario, capture_sizes(scenario.engine.max_num_seqs), [(_SMOKED, 0)])


def _kernels(hardware: HardwareSpec) -> None:
    _problems("serving", torch.bfloat16)


def _problems(kind: str, dtype: torch.dtype) -> None:
    """By rank, as they are measured. What cannot be recorded is left to the task, which says what is wrong."""
    kernels = load_kernels("triton")
    listed = [problems_of(operator, kind, dtype) for operator, rows in KERNELS.items() if "triton" in rows]
    for rank in range(max(map(len, listed), default=0)):
        for problem in (problems[rank] for problems in listed if rank < len(problems)):
            with _left_to_the_task():
                getattr(kernels, problem.operator)(*problem.make(Inputs(META)))


def _single_steps(hardware: HardwareSpec) -> None:
    for model, overrides in MODELS["cuda"]:
        scenario = steps_scenario(model, overrides, hardware.name)
        _steps(scenario, [size for size, _ in DECODES["cuda"]], PROMPTS["cuda"])


def _servings(hardware: HardwareSpec) -> None:
    for name in SCENARIOS:
        _served(load_scenario(f"executor/{name}", [f"hardware={hardware.name}"]))


def _pairs(hardware: HardwareSpec) -> None:
    for name in PAIRS:
        for overrides in sides_of(f"executor/pairs/{name}"):
            _served(load_scenario(f"executor/pairs/{name}", [f"hardware={hardware.name}", *overrides]))


def _served(scenario: Scenario) -> None:
    engine = scenario.engine
    chunks = [(new, 0) for new in _CHUNKS if new <= engine.max_num_batched_tokens]
    _steps(scenario, capture_sizes(engine.max_num_seqs), chunks)


def _steps(scenario: Scenario, batches: Sequence[int], prompts: Sequence[tuple[int, int]]) -> None:
    """prompts: (new tokens, computed before)"""
    with _left_to_the_task():
        # One layer of each kind: the others launch the same.
        model = replace(scenario.model, layers=tuple((layer, 1) for layer, _ in scenario.model.layers))
        decoder = load_decoder(model, scenario.engine, device=META, kernels=load_kernels("triton"))
        # Graphs have block tables as wide as a context can become, other steps as wide as one is.
        contexts = (scenario.engine.max_model_len or model.max_position_embeddings, _CONTEXT)
        shapes = [BatchShape(size, size, (), size, size * context) for context in contexts for size in batches]
        shapes += [BatchShape(new, 1, ((new, done),), 0, 0) for new, done in prompts]
        for shape in shapes:
            record_step(decoder, scenario.engine.block_size, shape)


@contextmanager
def _left_to_the_task() -> Iterator[None]:
    try:
        yield
    except (PerfmodelError, RuntimeError, NotImplementedError, ValueError):
        return


_RECORDED = {"kernels": _kernels, "steps": _single_steps, "serving": _servings, "pairs": _pairs}
