"""From steps that another engine recorded (`perfmodel execute --on`) to a calibration of this device under that engine.

A step of such a record is all that the engine did: host, kernels, tokens handed out. It is fitted as a whole step of
our own executor is (`whole_steps`): host time per step, per sequence and per prompt shows as overhead of kernels and of
items, work as achieved fractions of compute and memory. So the profile that goes with it adds nothing.

Steps that differ in little but the context of their decodes are pooled, and the fit is to the pools' medians: a step
that something else on the machine has held up moves none of them.
"""

__all__ = ["Chunks", "EngineSteps", "fit_engine_steps", "read_chunks", "shapes_of"]

import csv
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

from perfmodel.calibrate.whole_steps import FitResult, features, fit_steps
from perfmodel.cost import scenario_graph
from perfmodel.cost.calibrations.engine_profile import EngineProfile
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape
from perfmodel.sim.records.columns import StepColumns
from perfmodel.specs.scenario import Scenario

Chunks = Mapping[int, Sequence[tuple[int, int]]]

_POOL = 0.25  # of the logarithm of a context, or of a chunk's tokens: steps within it are pooled
_FEWEST_STEPS = 20


class EngineSteps(NamedTuple):
    """The steps of a run; chunks: (tokens, tokens computed before) of each prompt's part, by the step's index.

    speed: of the machine while it ran, over that of the other runs; 1 where nobody has measured it
    """

    scenario: Scenario
    steps: StepColumns
    chunks: Chunks
    speed: float = 1.0


def read_chunks(path: Path) -> dict[int, list[tuple[int, int]]]:
    """`chunks.csv` of a run. Raises SpecError for another file."""
    found: dict[int, list[tuple[int, int]]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                part = int(row["num_tokens"]), int(row["num_computed_tokens"])
                found.setdefault(int(row["step"]), []).append(part)
    except (OSError, KeyError, ValueError) as error:
        raise SpecError(f"{path}: is no chunks.csv of `perfmodel execute --on` ({error}).") from None
    return found


def fit_engine_steps(runs: Sequence[EngineSteps]) -> FitResult:
    """The calibration that explains the steps of `runs`, which are of one device under one engine, best.

    Raises SpecError for too few steps.
    """
    rows, samples = [], []
    for scenario in {id(run.scenario): run.scenario for run in runs}.values():
        graph = scenario_graph(scenario, EngineProfile(engine=scenario.engine.profile))
        for shape, seconds in _pooled([run for run in runs if run.scenario is scenario]):
            rows.append(features(graph, scenario.hardware, shape))
            samples.append(seconds)
    if sum(map(len, samples)) < _FEWEST_STEPS:
        raise SpecError(
            f"found {sum(map(len, samples))} steps in {len(runs)} runs, allowed at least {_FEWEST_STEPS} to fit to; "
            f"raise traffic.num_requests."
        )
    return fit_steps(runs[0].scenario.hardware, rows, samples, runs[0].scenario.engine.described.description.name)


def shapes_of(run: EngineSteps) -> list[BatchShape]:
    """What each recorded step computed, its drafted tokens apart. Of decodes only the summed context is known: each is
    taken to have its share."""
    steps, spans = run.steps, run.scenario.model.attention_spans
    found = []
    for number, index in enumerate(steps.index.tolist()):
        decodes, context = int(steps.num_decodes[number]), int(steps.decode_context[number])
        prefills = tuple((tokens, before) for tokens, before in run.chunks.get(index, ()))
        mean = context / max(1, decodes)
        shape = BatchShape(
            num_tokens=int(steps.num_tokens[number]),
            num_samples=decodes + len(prefills),
            prefills=prefills,
            num_decodes=decodes,
            decode_context=context,
            decode_windowed=tuple(round(decodes * min(mean, span)) for span in spans),
            num_draft_tokens=int(steps.num_draft_tokens[number]),
        )
        found.append(shape)
    return found


def _pooled(runs: Sequence[EngineSteps]) -> list[tuple[BatchShape, list[float]]]:
    """Pools of steps that are nearly alike: the shape in the middle of each, and the seconds of all."""
    pools: dict[tuple[object, ...], list[tuple[int, BatchShape, float]]] = {}
    for run in runs:
        durations = (run.steps.end_s - run.steps.start_s) * run.speed
        for raw, seconds in zip(shapes_of(run), durations.tolist(), strict=True):
            shape = raw.verified(run.scenario.model.attention_spans) if raw.num_draft_tokens else raw
            chunks = tuple(sorted((_bin(tokens), _bin(before)) for tokens, before in shape.prefills))
            key = (shape.num_decodes, shape.decode_tokens, _bin(shape.decode_context), chunks)
            pools.setdefault(key, []).append((shape.decode_context, shape, seconds))
    found = []
    for pool in pools.values():
        pool.sort(key=lambda each: each[0])
        found.append((pool[len(pool) // 2][1], [seconds for _, _, seconds in pool]))
    return found


def _bin(count: int) -> int:
    return -1 if count == 0 else round(log(count) / _POOL)
