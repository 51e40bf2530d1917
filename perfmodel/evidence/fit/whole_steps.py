"""Fits a `Calibration` to whole-step times: few bounded parameters, least squares of relative errors.

Operators timed alone sum to 29 % less than their step (hot loops flatter them): the fit divides a step over its graph:

    t(step) = overhead * kernels + sum over families of (item * items + vector * vector ops + compute / c + memory / m)

with compute and memory in seconds at declared peaks, so c and m are achieved fractions; vector ops convert cached
integers, which a CPU writes out before multiplying. Features come from `OperatorTimer` under unit calibrations: fit and
simulator share one formula. What one model cannot separate (kernel overhead and weight bytes, both constant per step)
is settled by a weak prior; only the sum matters on that model, as the source text says.

Steps recorded on another engine (`perfmodel execute --on`) include all of its host work, so the profile adds nothing.
Steps that differ mainly in decode context are pooled, and pool medians are fitted, which reject steps disturbed by
other processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from perfmodel.cost import scenario_graph
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.engine_profile import EngineProfile
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Floats
from perfmodel.files.sandbox import read_rows
from perfmodel.files.tables import load_table
from perfmodel.ops.attention.decode import VERIFYING
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.work import BatchShape
from perfmodel.sim.records.columns import StepColumns
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario

_PULL = 0.001  # a parameter at twice its prior weighs as much as this relative error on every step (see `_solve`)
_NUM_FOLDS = 5
_FAMILIES = (
    *("gemm", "elementwise", "sampling", "embedding", "attention_prefill", "attention_decode", "scan", "moe"),
    "collective",
    "lora",
)


class StepParameter(NamedTuple):
    """One coefficient, as `workloads/tables/fit_parameters.yaml` explains it."""

    family: str | None
    quantity: str
    low: float
    prior: float
    high: float


PARAMETERS = tuple(StepParameter(*row) for row in load_table("fit_parameters")["whole_steps"])
_SHARED = ("gemm", "elementwise", "sampling", "embedding")  # families that share the overhead per kernel
_BY_FORMAT = ("gemm", "moe")  # families whose kernels differ by number format
_QUANTIZED_RATES = ("fp8", "int8")
# Families without parameters: small parts of the step, as in families that move bytes or unpack alike.
_LIKE = {
    "memory": {"embedding": "elementwise", "attention_prefill": "attention_decode"},
    "vector": {"attention_prefill": "attention_decode"},
}


@dataclass(frozen=True)
class FitResult:
    """The calibration with residuals; `errors` are out-of-fold predicted / measured - 1 of each step."""

    calibration: Calibration
    errors: list[float]
    coefficients: dict[str, float]


def features(graph: StepGraph, hardware: HardwareSpec, shape: BatchShape) -> dict[tuple[str, str], float]:
    """(family, quantity) -> total over the step: kernels and items as counts, the rest in seconds at declared rates.
    Products in other formats than the model's are their own family; so are the sequences of verifying decodes, which
    the prompt kernel serves."""

    def timer(default: FamilyFit) -> OperatorTimer:
        return OperatorTimer(hardware, Calibration(device=hardware.name, engine="unit", default=default))

    peak, items = timer(FamilyFit(knee=1.0)), timer(FamilyFit(overhead_per_item_s=1.0, knee=1.0))
    totals: dict[tuple[str, str], float] = {}
    for node in graph.nodes:
        work = node.work(shape)
        if not work.num_kernels:
            continue
        at_peak, is_verifying = peak.time(replace(work, vector_ops=0.0)), work.format == VERIFYING
        format = work.format or (work.rate if work.rate in _QUANTIZED_RATES else "")
        own = f"{work.family}/{format}" if format and (work.family in _BY_FORMAT or is_verifying) else work.family
        for quantity, value in (
            ("kernels", float(work.num_kernels)),
            ("items", items.time(work).overhead_s),
            ("compute", at_peak.compute_s),
            ("memory", at_peak.memory_s + at_peak.communication_s),  # of a message: the link's
            ("vector", work.vector_ops),
        ):
            key = (work.family if is_verifying and quantity != "items" else own, quantity)
            totals[key] = totals.get(key, 0.0) + node.expected_runs(shape) * value
    return totals


def fit_steps(
    hardware: HardwareSpec,
    rows: Sequence[Mapping[tuple[str, str], float]],
    samples: Sequence[Sequence[float]],
    engine: str = "perfmodel",
) -> FitResult:
    """Fit the parameters of `hardware` under `engine` that occur in `rows` (see `features`; of one model or several).
    samples: repeated measurements of each row in seconds. The fit is to medians; residuals are those of single samples
    from out-of-fold predictions, as a run executes each step once"""
    formats = sorted({family for row in rows for family, _ in row if "/" in family})
    own = [p._replace(family=item) for item in formats for p in PARAMETERS if p.family == _base(item)]
    used = [p for p in (*PARAMETERS, *own) if any(_column(p, row) > 0 for row in rows)]
    design = np.array([[_column(p, row) for p in used] for row in rows])
    target = np.array([median(row) for row in samples])
    values = _solve(design, target, used)
    errors, folds = np.empty(len(target)), min(_NUM_FOLDS, len(target))
    for fold in range(folds):  # predicted / measured - 1 of each step, by a fit without it
        held_out = np.arange(len(target)) % folds == fold
        errors[held_out] = design[held_out] @ _solve(design[~held_out], target[~held_out], used) / target[held_out] - 1
    logs = [np.log(np.asarray(row) / p) for row, p in zip(samples, target * (1 + errors), strict=True)]
    joined = np.concatenate(logs)
    p10, p50, p90 = np.quantile(joined, [0.1, 0.5, 0.9]).tolist()
    residuals = Residuals(num_rows=len(joined), p10=p10, p50=p50, p90=p90)
    fits = _families(dict(zip(used, values, strict=True)), residuals)
    calibration = Calibration(
        device=hardware.name, engine=engine, families=fits, default=fits["elementwise"], step_residuals=residuals
    )
    names = {f"{p.family or 'kernel'}.{p.quantity}": float(v) for p, v in zip(used, values, strict=True)}
    return FitResult(calibration, errors.tolist(), names)


def _column(parameter: StepParameter, row: Mapping[tuple[str, str], float]) -> float:
    family, quantity = parameter.family, parameter.quantity
    if family is None:
        return sum(value for (name, kind), value in row.items() if kind == "kernels" and _base(name) in _SHARED)
    like = (name for name, model in _LIKE.get(quantity, {}).items() if model == family)
    return row.get((family, quantity), 0.0) + sum(row.get((name, quantity), 0.0) for name in like)


def _base(family: str) -> str:
    """A family without its number format."""
    return family.split("/")[0]


def _solve(design: Floats, target: Floats, used: Sequence[StepParameter]) -> Floats:
    """Least squares of relative errors plus the pull of each parameter to its prior, within bounds. Priors are scaled
    by the machine's median step time. A processor without the instructions of the declared peak is a hundred times
    slower; unscaled priors would make its products 30 % faster than measured."""
    prior = np.array([p.prior for p in used])
    prior = prior * np.median(target / (design @ prior))
    weight = _PULL * np.sqrt(len(target))
    stacked = np.vstack([design * prior / target[:, None], weight * np.eye(len(used))])
    wanted = np.concatenate([np.ones(len(target)), np.full(len(used), weight)])
    bounds = ([p.low / p.prior for p in used], [p.high / p.prior for p in used])
    solved: Floats = lsq_linear(stacked, wanted, bounds).x * prior
    return solved


def _families(fitted: dict[StepParameter, float], residuals: Residuals) -> dict[str, FamilyFit]:
    value = {(p.family, p.quantity): v for p, v in fitted.items()}
    fits = {}
    for family in (*_FAMILIES, *sorted({p.family for p in fitted if p.family is not None and "/" in p.family})):
        like = family if (family, "compute") in value else _base(family)
        compute = value.get((like, "compute"), 1.0)
        memory = value.get((_LIKE["memory"].get(like, like), "memory"), 1.0)
        fits[family] = FamilyFit(
            compute_fraction=min(1.0, 1 / compute),
            memory_fraction=min(1.0, 1 / memory),
            overhead_s=value.get((None if _base(family) in _SHARED else family, "kernels"), 0.0),
            overhead_per_item_s=value.get((family, "items"), 0.0),
            vector_op_s=value.get((_LIKE["vector"].get(like, like), "vector"), 0.0),
            knee=1.0,
            residuals=residuals,
        )
    return fits


Chunks = Mapping[int, Sequence[tuple[int, int]]]

_POOL = 0.25  # of the logarithm of a context, or of a chunk's tokens: steps within it are pooled
_FEWEST_STEPS = 20


class EngineSteps(NamedTuple):
    """Steps of a run; chunks: (tokens, tokens computed before) of each prompt chunk, by step index. speed: machine
    speed during the run relative to other runs; 1 if not measured"""

    scenario: Scenario
    steps: StepColumns
    chunks: Chunks
    speed: float = 1.0


def read_chunks(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Read a run's `chunks.csv`. Raises SpecError for another file."""
    result: dict[int, list[tuple[int, int]]] = {}
    try:
        for row in read_rows(path):
            part = int(row["num_tokens"]), int(row["num_computed_tokens"])
            result.setdefault(int(row["step"]), []).append(part)
    except (OSError, KeyError, ValueError) as error:
        raise SpecError(f"{path}: is no chunks.csv of `perfmodel execute --on` ({error}).") from None
    return result


def fit_engine_steps(runs: Sequence[EngineSteps]) -> FitResult:
    """Fit a calibration to the steps of `runs`, of one device and engine. Raises SpecError for too few steps."""
    rows, samples = [], []
    for scenario in {id(run.scenario): run.scenario for run in runs}.values():
        graph = scenario_graph(scenario, EngineProfile(engine=scenario.engine.profile))
        for shape, seconds in _pooled([run for run in runs if run.scenario is scenario]):
            rows.append(features(graph, scenario.hardware, shape))
            samples.append(seconds)
    if sum(map(len, samples)) < _FEWEST_STEPS:
        raise SpecError(
            f"got {sum(map(len, samples))} steps in {len(runs)} runs; expected at least {_FEWEST_STEPS} to fit to; "
            f"raise traffic.num_requests."
        )
    return fit_steps(runs[0].scenario.hardware, rows, samples, runs[0].scenario.engine.described.description.name)


def shapes_of(run: EngineSteps) -> list[BatchShape]:
    """Shape of each recorded step, drafted tokens apart; the summed decode context is divided evenly."""
    steps, spans = run.steps, run.scenario.model.attention_spans
    columns = steps.index, steps.num_tokens, steps.num_decodes, steps.decode_context, steps.num_draft_tokens
    result = []
    for index, num_tokens, decodes, context, drafted in zip(*(column.tolist() for column in columns), strict=True):
        prefills = tuple((tokens, before) for tokens, before in run.chunks.get(index, ()))
        mean = context / max(1, decodes)
        shape = BatchShape(
            num_tokens=num_tokens,
            num_samples=decodes + len(prefills),
            prefills=prefills,
            num_decodes=decodes,
            decode_context=context,
            decode_windowed=tuple(round(decodes * min(mean, span)) for span in spans),
            num_draft_tokens=drafted,
        )
        result.append(shape)
    return result


def _pooled(runs: Sequence[EngineSteps]) -> list[tuple[BatchShape, list[float]]]:
    """Pools of similar steps: the median shape of each, and the seconds of all."""
    pools: dict[tuple[object, ...], list[tuple[BatchShape, float]]] = {}
    for run in runs:
        durations = (run.steps.end_s - run.steps.start_s) * run.speed
        for raw, seconds in zip(shapes_of(run), durations.tolist(), strict=True):
            shape = raw.verified(run.scenario.model.attention_spans) if raw.num_draft_tokens else raw
            chunks = tuple(sorted((_bin(tokens), _bin(before)) for tokens, before in shape.prefills))
            key = (shape.num_decodes, shape.decode_tokens, _bin(shape.decode_context), chunks)
            pools.setdefault(key, []).append((shape, seconds))
    ordered = [sorted(pool, key=lambda item: item[0].decode_context) for pool in pools.values()]
    return [(pool[len(pool) // 2][0], [seconds for _, seconds in pool]) for pool in ordered]


def _bin(count: int) -> int:
    return -1 if count == 0 else round(log(count) / _POOL)
