"""How an executed run draws its tokens: settings of a scenario, and a random number for each token.

A token's number is a hash of seed, request and position, whoever runs beside it: batches, chunks, preemptions and
drafts change no token, and another run with the seed gives the same text.
"""

__all__ = ["Draws"]

import numpy as np

from perfmodel.engine import Request
from perfmodel.sim.traffic.hashed import hashed, hashes
from perfmodel_executors.kernels.sampling import DRAW_BITS

_PURPOSE = int.from_bytes(b"sampling")
_HASH_BITS = 64


class Draws:
    """Random numbers of tokens under `seed`, integers of 31 bits."""

    def __init__(self, seed: int) -> None:
        self._seed = hashed(seed, _PURPOSE)
        self._known: dict[int, list[int]] = {}

    def of(self, request_id: int, position: int, count: int = 1) -> list[int]:
        """The numbers of `count` tokens of the request, the first of them at `position`."""
        known = self._known.setdefault(request_id, [])
        if len(known) < position + count:
            # Twice as many, since a request asks for one after the other.
            numbers = hashes(hashed(self._seed, request_id), 2 * (position + count)) >> np.uint64(
                _HASH_BITS - DRAW_BITS
            )
            known[:] = numbers.tolist()
        return known[position : position + count]

    def release(self, request: Request) -> None:
        """Forget a finished request."""
        self._known.pop(request.request_id, None)
