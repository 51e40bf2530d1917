"""`Forecast`: how many requests a search has simulated, and how many it still expects to simulate.

A run takes time in proportion to its requests, and a search for a highest rate takes several runs. So a forecast counts
requests, not searches: the share of them that is done is the share of the time that has passed.
"""

__all__ = ["Forecast"]

from collections.abc import Hashable

from perfmodel.planning.sweeps.workers import Progress


class Forecast:
    """Requests of all tasks of a search.

    progress: called with (requests simulated, requests expected in all)
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress, self._done = progress, 0.0
        self._ahead: dict[Hashable, float] = {}

    def expect(self, task: Hashable, requests: float) -> None:
        """Expect `task` to simulate so many requests from now on; 0: it is over."""
        self._ahead[task] = requests
        if self._progress is not None:
            self._progress(round(self._done), round(self._done + sum(self._ahead.values())))

    def did(self, task: Hashable, requests: float, is_last: bool = False) -> None:
        """Count a run of `task` with so many requests. Expect at least one more such run unless this one `is_last`."""
        self._done += requests
        self.expect(task, 0.0 if is_last else max(self._ahead.get(task, 0.0) - requests, requests))
