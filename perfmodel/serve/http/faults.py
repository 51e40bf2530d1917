"""Faults that are injected: which request fails, and how; `BreakingOutlet`: an answer that ends in its middle."""

__all__ = ["BreakingOutlet", "FaultDraws"]

import asyncio

from starlette.types import Send

from perfmodel.serve.http.errors import HttpError
from perfmodel.serve.http.outlet import Outlet
from perfmodel.serve.settings import InjectedFaults
from perfmodel.sim.traffic.distributions import Shares, uniform_draws


class FaultDraws:
    """Draws with `seed` which requests fail, and how: each by its number."""

    def __init__(self, faults: InjectedFaults, seed: int) -> None:
        self._kinds, self._seed = faults.kinds, seed
        self._shares = Shares([faults.rate / len(faults.kinds)] * len(faults.kinds), seed, "faults")
        self._is_on = faults.rate > 0

    def check(self, number: int) -> float | None:
        """Where the answer to request `number` breaks, as a share of it; None: it does not.

        Raises HttpError for one that is to fail at once.
        """
        kind = self._shares.of(number) if self._is_on else len(self._kinds)
        if kind == len(self._kinds):
            return None
        name = self._kinds[kind]
        if name == "429":
            again = {"retry-after": "1"}
            raise HttpError(429, "too many requests, says --fail; try again", "RateLimitError", headers=again)
        if name == "500":
            raise HttpError(500, "the engine has failed, says --fail", "InternalServerError")
        return float(uniform_draws(self._seed, number, 1)[0])


class BreakingOutlet(Outlet):
    """Sends `num_parts` parts of an answer over `send`, but of a whole one only half; `broken` is set then."""

    def __init__(self, send: Send, num_parts: int) -> None:
        super().__init__(send)
        self.broken = asyncio.Event()
        self._left = num_parts

    def body(self, data: bytes, is_last: bool = False) -> None:
        """Go on with the answer, if it is not broken."""
        if self.broken.is_set():
            return
        self._left -= 1
        if is_last:
            data, self._left = data[: len(data) // 2], 0
        super().body(data)
        if self._left <= 0:
            self.broken.set()
