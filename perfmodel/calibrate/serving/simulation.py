"""Recorded serving runs on the simulated clock, for fitting an engine's profile and for judging it."""

__all__ = ["StageRow", "accelerated", "shortened", "simulate_runs"]

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from perfmodel.calibrate.serving.runs import ServingRun, StageLatencies, stage_latencies
from perfmodel.cost import Calibration, EngineProfile, load_calibration
from perfmodel.sim import simulate

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StageRow:
    """One stage of a run: what was predicted beside what was measured, in ms.

    intervals: the ends of the 80 % interval of means, as factors of the predicted value, by metric
    """

    run: ServingRun
    stage: int
    predicted: StageLatencies
    origin: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """How far the fits of the run's device have come."""
        scenario = self.run.scenario
        return load_calibration(scenario.hardware, scenario.engine.profile).spread

    @property
    def measured(self) -> StageLatencies:
        return self.run.measured[self.stage]

    @property
    def label(self) -> str:
        return f"{self.run.run_id}, stage {self.stage}"


def simulate_runs(
    runs: Sequence[ServingRun],
    progress: Progress | None = None,
    calibration: Calibration | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = False,
) -> list[StageRow]:
    """All stages of all runs, simulated over the cores of this machine; the answer does not depend on how many.

    calibration, profile: instead of the committed ones
    intervals:            whether predictions get 80 % intervals
    """
    work = partial(_simulate_run, calibration=calibration, profile=profile, intervals=intervals)
    rows: list[StageRow] = []
    with ProcessPoolExecutor(min(len(runs), len(os.sched_getaffinity(0)))) as pool:
        for done, found in enumerate(pool.map(work, runs), 1):
            rows += found
            if progress is not None:
                progress(done, len(runs))
    return rows


def shortened(run: ServingRun, share: float) -> ServingRun:
    """`run` with each stage cut to `share` of its duration at the same rate: its means, sooner.

    Prompts that were all new at the beginning stay so: the shorter the stage, the larger their part.
    """
    return _with_stages(run, share, 1.0)


def accelerated(run: ServingRun, factor: float) -> ServingRun:
    """`run` with the same requests arriving `factor` times as fast.

    With time in units so much shorter, this is the run itself on an engine whose steps take `factor` times as long.
    """
    return _with_stages(run, 1.0 / factor, factor)


def _with_stages(run: ServingRun, longer: float, faster: float) -> ServingRun:
    """`run` with stages `longer` times as long, requests arriving `faster` times as fast."""
    traffic = run.scenario.traffic
    stages = tuple(
        stage.model_copy(update={"duration_s": stage.duration_s * longer, "rate": stage.rate * faster})
        for stage in traffic.arrivals.stages
    )
    arrivals = traffic.arrivals.model_copy(update={"stages": stages})
    scenario = run.scenario.model_copy(update={"traffic": traffic.model_copy(update={"arrivals": arrivals})})
    return replace(run, scenario=scenario, stage_ends_s=tuple(end * longer for end in run.stage_ends_s))


def _simulate_run(
    run: ServingRun,
    calibration: Calibration | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = False,
) -> list[StageRow]:
    result = simulate(run.scenario, calibration=calibration, profile=profile, keep_steps=False, intervals=intervals)
    assert result.requests is not None
    latencies = stage_latencies(run, result.requests)
    starts = (0.0, *run.stage_ends_s[:-1])
    rows = []
    for i, (start, end, found) in enumerate(zip(starts, run.stage_ends_s, latencies, strict=True)):
        factors = result.ensemble.factors((start, end)) if result.ensemble is not None else {}
        mine = {f"{metric}_mean": ends for metric, ends in factors.items()}
        rows.append(StageRow(run, i, found, result.summary["origin"], mine))
    return rows
