"""Load tests of one's own server as they are simulated to fit it: which say something of host and front end, and how
many of their requests are enough."""

__all__ = ["METRICS", "FittedRun", "prepared_runs"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perfmodel.calibrate.bench.runs import BenchRun, RequestTimes, figures_of
from perfmodel.calibrate.bench.scenarios import GivenSetup, bench_scenario
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.specs.scenario import Scenario

METRICS = ("mean_tpot_ms", "mean_ttft_ms")
_MOST_REQUESTS = 300  # of a run that is simulated for the fit: its means have settled
_PER_SLOT = 5  # requests of a closed loop, likewise
_OVERLOADED = 0.5  # share of the latency before the first token from which on a backlog must have grown


@dataclass(frozen=True)
class FittedRun:
    """A run as it is simulated for the fit; measured: figures of the same `num_requests`, those of `METRICS` that it
    has."""

    name: str
    tool: str
    scenario: Scenario
    measured: Mapping[str, float]
    num_requests: int


def prepared_runs(
    runs: Sequence[BenchRun], given: GivenSetup, engine: str, folder: Path
) -> tuple[list[FittedRun], list[tuple[str, str]]]:
    """(runs that say something of the engine's numbers, (run, reason) of the others).

    runs, given: what was measured, and what the user says of the setup
    engine:      that the runs should be of; folder: for traces of their requests
    """
    mine: list[FittedRun] = []
    left_out: list[tuple[str, str]] = []
    for run in runs:
        try:
            mine.append(_prepare(run, given, engine, folder))
        except PerfmodelError as error:
            left_out.append((run.name, str(error)))
    return mine, left_out


def _prepare(run: BenchRun, given: GivenSetup, engine: str, folder: Path) -> FittedRun:
    if run.row is not None or run.load.process == "burst":
        what = "is a test of llama-bench" if run.row is not None else "sent all its requests at once"
        raise SpecError(f"{run.name}: {what}: its times say nothing of host and front end; measure at rates below.")
    run = _shortened(run)
    measured = {metric: run.measured[metric] for metric in METRICS if metric in run.measured}
    if not measured:
        raise SpecError(f"{run.name}: has no mean TTFT and no mean TPOT, which tell host and front end.")
    if _is_overloaded(run):
        raise SpecError(
            f"{run.name}: waited for its first tokens longer than for all others: a backlog had grown, which "
            f"multiplies small errors; measure below capacity."
        )
    scenario, _ = bench_scenario(run, given, folder)
    found = scenario.engine.described.description.name
    if found != engine:
        raise SpecError(f"{run.name}: is of engine {found}, and --engine is {engine}; set engine.profile, or --engine.")
    num_requests = run.load.num_requests if run.times is None else len(run.times)
    return FittedRun(run.name, run.tool, scenario, measured, num_requests)


def _shortened(run: BenchRun) -> BenchRun:
    """`run` with fewer requests, where it has many; of the same requests its figures."""
    load, times = run.load, run.times
    most = max(_MOST_REQUESTS, _PER_SLOT * (load.concurrency or 0))
    if load.num_requests <= most:
        return run
    run = replace(run, load=replace(load, num_requests=most))
    if times is None or len(times) <= most:
        return run
    starts = None if times.start_s is None else times.start_s[:most]
    tokens = times.num_prompt_tokens[:most], times.num_output_tokens[:most]
    first = RequestTimes(starts, *tokens, times.ttft_s[:most], times.e2el_s[:most])
    return replace(run, times=first, measured={**run.measured, **figures_of(first)})


def _is_overloaded(run: BenchRun) -> bool:
    ttft, e2el = (run.measured.get(f"mean_{metric}_ms") for metric in ("ttft", "e2el"))
    return run.load.process == "open" and ttft is not None and e2el is not None and ttft > _OVERLOADED * e2el
