"""`DriftMeter`: how fast the machine is now, compared with when it was calibrated: the reference step of the
calibration, run between the steps of a run; durations times `reference then / reference now` are at the calibrated
speed. Paired measurement. On a shared machine the same code takes 30 % more or less from one second to the next. The
spread of medians between runs under load: wall time 33 %, minimum of k 34 %, CPU time of the thread 6 %, paired CPU
time 5 %. So: CPU time of one thread, samples in random order over rounds, each between two reference steps of the same
model; the median over rounds of time / reference, times the reference's own median over the whole session."""

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Generic, NamedTuple, TypeVar

import numpy as np


class DriftMeter:
    """The last `window` runs of `reference`, one in `every` steps, against `reference_s`, its time at calibration."""

    def __init__(
        self,
        reference: Callable[[], object],
        reference_s: float,
        every: int = 1,
        window: int = 5,
        clock_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._reference, self.reference_s, self._every = reference, reference_s, every
        self._recent: deque[int] = deque(maxlen=window)
        self._clock_ns = clock_ns
        self._num_calls = 0
        reference()  # the first run after other work finds cold caches

    def measure(self) -> float:
        """Run the reference if it is due; returns reference then / reference now."""
        if self._num_calls % self._every == 0:
            self._recent.append(taken_ns(self._reference, self._clock_ns))
        self._num_calls += 1
        return self.reference_s / (median(self._recent) * 1e-9)


Key = TypeVar("Key")


class Measured(NamedTuple, Generic[Key]):
    """Seconds per case at the reference's speed: medians over rounds; samples: all; reference_s: its median time."""

    seconds: dict[Key, float]
    samples: dict[Key, list[float]]
    reference_s: float
    num_rounds: int

    @property
    def spread(self) -> float:
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
    return float(np.quantile(values, q))


def taken_ns(call: Callable[[], object], clock_ns: Callable[[], int] = time.thread_time_ns) -> int:
    start = clock_ns()
    call()
    return clock_ns() - start


class PairedCases(NamedTuple, Generic[Key]):
    """What to time, and the reference step of the same model that every sample of it is paired with. clock_ns: what
    times are differences of, where the session's clock does not see the work."""

    cases: Mapping[Key, Callable[[], object]]
    reference: Callable[[], object]
    clock_ns: Callable[[], int] | None = None


def measure_together(
    groups: Sequence[PairedCases[Key]],
    min_rounds: int = 10,
    budget_s: float = 30.0,
    seed: int = 0,
    clock_ns: Callable[[], int] = time.thread_time_ns,
    progress: Callable[[int, int | None], None] | None = None,
) -> list[Measured[Key]]:
    """Times the cases of all groups in random order over `min_rounds` rounds, and more while `budget_s` of wall lasts;
    groups take turns in every round. Every case runs twice untimed first, and once before each sample, so that it finds
    the caches as its own kind of step leaves them. progress: called with (rounds done, rounds at least)."""
    rng = random.Random(seed)
    sessions = [_Session(group, clock_ns) for group in groups]
    started, rounds = time.monotonic(), 0
    with uninterrupted():
        while rounds < min_rounds or (time.monotonic() - started) * (rounds + 1) / rounds < budget_s:
            order = list(sessions)
            rng.shuffle(order)
            for session in order:
                session.run_round(rng)
            rounds += 1
            if progress is not None:
                progress(rounds, max(rounds, min_rounds))
    return [session.measured(rounds) for session in sessions]


class _Session(Generic[Key]):
    def __init__(self, group: PairedCases[Key], clock_ns: Callable[[], int]) -> None:
        self._group = group
        self._clock_ns = group.clock_ns or clock_ns
        self._ratios: dict[Key, list[float]] = {key: [] for key in group.cases}
        self._references: list[int] = []
        for case in group.cases.values():
            case()
            case()

    def run_round(self, rng: random.Random) -> None:
        cases, reference, clock_ns = self._group.cases, self._group.reference, self._clock_ns
        order = list(cases)
        rng.shuffle(order)
        reference()  # finds the caches as another group left them
        for key in order:
            before = taken_ns(reference, clock_ns)
            cases[key]()
            sample = taken_ns(cases[key], clock_ns)
            reference()
            after = taken_ns(reference, clock_ns)
            self._references += (before, after)
            self._ratios[key].append(2 * sample / (before + after))

    def measured(self, rounds: int) -> Measured[Key]:
        unit = median(self._references) * 1e-9
        samples = {key: [ratio * unit for ratio in case] for key, case in self._ratios.items()}
        return Measured({key: median(case) for key, case in samples.items()}, samples, unit, rounds)
