"""Paired measurement: every sample is bracketed by a reference step of the same model, and the ratio is what counts.

On a shared machine, the same code takes 30 % more or less from one second to the next. What helps, measured as the
spread of medians between runs under load: wall time 33 %, minimum of k 34 %, CPU time of the thread 6 %, paired CPU
time 5 %. So: CPU time of one thread, samples in random order over rounds, each between two reference steps; the
median over rounds of time / reference, times the reference's own median over the whole session.
"""

__all__ = ["Measured", "measure_paired", "quantile", "uninterrupted"]

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True)
class Measured(Generic[Key]):
    """Seconds per case at the session's reference speed.

    seconds:     median over the rounds
    samples:     all rounds
    reference_s: median time of the reference step
    """

    seconds: dict[Key, float]
    samples: dict[Key, list[float]]
    reference_s: float
    num_rounds: int

    @property
    def spread(self) -> float:
        """p90 / p10 - 1 of a case's samples, on average over the cases."""
        return fmean(quantile(s, 0.9) / quantile(s, 0.1) - 1 for s in self.samples.values())


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Python's cyclic garbage collector off: a full collection takes 20 to 100 ms of the timed thread's CPU time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between order statistics."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def measure_paired(
    cases: Mapping[Key, Callable[[], object]],
    reference: Callable[[], object],
    min_rounds: int = 10,
    budget_s: float = 30.0,
    seed: int = 0,
    clock_ns: Callable[[], int] = time.thread_time_ns,
    progress: Callable[[int, int | None], None] | None = None,
) -> Measured[Key]:
    """Times all `cases` in random order over `min_rounds` rounds, and more while `budget_s` of wall time lasts.

    Every case runs twice untimed first, and once untimed before each sample, so that a sample finds the caches as its
    own kind of step leaves them, not as the reference did. `progress` is called with (rounds done, rounds at least).
    """
    rng = random.Random(seed)
    ratios: dict[Key, list[float]] = {key: [] for key in cases}
    references: list[int] = []
    for case in cases.values():
        case()
        case()
    started, rounds = time.monotonic(), 0
    with uninterrupted():
        while rounds < min_rounds or (time.monotonic() - started) * (rounds + 1) / rounds < budget_s:
            order = list(cases)
            rng.shuffle(order)
            for key in order:
                before = _time(reference, clock_ns)
                cases[key]()
                sample = _time(cases[key], clock_ns)
                reference()
                after = _time(reference, clock_ns)
                references += (before, after)
                ratios[key].append(2 * sample / (before + after))
            rounds += 1
            if progress is not None:
                progress(rounds, max(rounds, min_rounds))
    unit = median(references) * 1e-9
    samples = {key: [ratio * unit for ratio in case] for key, case in ratios.items()}
    return Measured({key: median(case) for key, case in samples.items()}, samples, unit, rounds)


def _time(call: Callable[[], object], clock_ns: Callable[[], int]) -> int:
    start = clock_ns()
    call()
    return clock_ns() - start
