"""`DriftMeter`: how fast the machine is now, compared with when it was calibrated.

A shared machine's speed drifts by tens of per cent within seconds. The meter runs the reference step of the
calibration between the steps of a run; measured durations times `reference then / reference now` are what the run
would have taken at the calibrated speed. It is outside the timed part and outside the virtual clock.
"""

__all__ = ["DriftMeter"]

import time
from collections import deque
from collections.abc import Callable
from statistics import median


class DriftMeter:
    """reference_s: what `reference` took when the machine was calibrated; the last `window` runs say what it takes now.

    every: run the reference before one in this many steps
    """

    def __init__(
        self,
        reference: Callable[[], object],
        reference_s: float,
        every: int = 1,
        window: int = 5,
        clock_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._reference = reference
        self.reference_s = reference_s
        self._every = every
        self._recent: deque[int] = deque(maxlen=window)
        self._clock_ns = clock_ns
        self._num_calls = 0
        reference()  # the first run after other work finds cold caches

    def measure(self) -> float:
        """Run the reference if it is due; returns reference then / reference now."""
        if self._num_calls % self._every == 0:
            start = self._clock_ns()
            self._reference()
            self._recent.append(self._clock_ns() - start)
        self._num_calls += 1
        return self.reference_s / (median(self._recent) * 1e-9)
