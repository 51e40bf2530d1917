"""How an executed run draws its tokens: settings of a scenario, and a random number for each token.

A token's number is a hash of seed, request and position, whoever runs beside it: batches, chunks, preemptions and
drafts change no token, and another run with the seed gives the same text.
"""

from typing import NamedTuple

import numpy as np

from perfmodel.engine import Request
from perfmodel.models.spec import ModelSpec
from perfmodel.sim.traffic.distributions import hashed, hashes
from perfmodel.specs.traffic import Sampling
from perfmodel_executors.kernels.sampling import DRAW_BITS

_TOP_K = 50  # Hugging Face's GenerationConfig
_TOP_P = 0.9  # Llama 3's generation_config.json


class SamplingSettings(NamedTuple):
    """What is drawn from. `top_k` 0, `top_p` 1 and `min_p` 0 leave everything; probabilities, but for top_k."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        limits = {"top_k": self.top_k, "top_p": self.top_p if self.top_p < 1 else 0, "min_p": self.min_p}
        said = [f"temperature {self.temperature:g}", *(f"{name} {value:g}" for name, value in limits.items() if value)]
        return ", ".join(said)


def settings_of(sampling: Sampling, model: ModelSpec) -> SamplingSettings | None:
    """What the scenario says, with the defaults of its method; None where tokens are chosen greedily."""
    method = model.sampling if sampling.method == "default" else sampling.method
    if method == "greedy":
        return None
    top_k = sampling.top_k or (_TOP_K if method == "top_k" else 0)
    top_p = sampling.top_p or (_TOP_P if method == "top_p" else 1.0)
    return SamplingSettings(sampling.temperature, top_k, top_p, sampling.min_p)


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
