"""How an executed run draws its tokens: by a scenario's settings, and a number for each token, a hash of seed, request
and position: batches, chunks, preemptions and drafts change no token, and equal seeds give equal texts."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perfmodel.engine import Request
from perfmodel.models.spec import ModelSpec
from perfmodel.sim.traffic.distributions import hashed, hashes
from perfmodel.specs.traffic import Sampling
from perfmodel_executors.kernels import Kernels
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
        return ", ".join([f"temperature {self.temperature:g}", *(f"{key} {v:g}" for key, v in limits.items() if v)])


def settings_of(sampling: Sampling, model: ModelSpec) -> SamplingSettings | None:
    method = model.sampling if sampling.method == "default" else sampling.method
    if method == "greedy":
        return None
    top_k = sampling.top_k or (_TOP_K if method == "top_k" else 0)
    top_p = sampling.top_p or (_TOP_P if method == "top_p" else 1.0)
    return SamplingSettings(sampling.temperature, top_k, top_p, sampling.min_p)


_PURPOSE = int.from_bytes(b"sampling")
_HASH_BITS = 64


class Draws:
    def __init__(self, seed: int) -> None:
        self._seed = hashed(seed, _PURPOSE)
        self._known: dict[int, list[int]] = {}

    def of(self, request_id: int, position: int, count: int = 1) -> list[int]:
        known = self._known.setdefault(request_id, [])
        if len(known) < position + count:
            # Twice as many, since a request asks for one after the other.
            numbers = hashes(hashed(self._seed, request_id), 2 * (position + count))
            known[:] = (numbers >> np.uint64(_HASH_BITS - DRAW_BITS)).tolist()
        return known[position : position + count]

    def release(self, request: Request) -> None:
        self._known.pop(request.request_id, None)


class TokenChooser:
    """Chooses tokens, greedily or as drawn, on `device` without asking it anything, so that a graph can hold it."""

    def __init__(self, kernels: Kernels, device: torch.device, settings: SamplingSettings | None = None) -> None:
        self.settings, self._kernels = settings, kernels
        self._num_nan = torch.zeros(1, dtype=torch.int64, device=device)
        drawn = settings or SamplingSettings()
        is_used = (True, drawn.top_k > 0, drawn.top_p < 1, drawn.min_p > 0)
        self._settings = [
            torch.tensor([value], dtype=torch.int32 if name == "top_k" else torch.float32, device=device)
            if used
            else None
            for (name, value), used in zip(drawn._asdict().items(), is_used, strict=True)
        ]

    @property
    def num_nan(self) -> int:
        """Logits so far that were not numbers. Waits for the device."""
        return int(self._num_nan)

    def choose(self, logits_SV: Tensor, draws_S: Tensor | None) -> Tensor:
        """[S]: the likeliest tokens, or those that the random numbers draw where there are settings to draw by."""
        if draws_S is None or self.settings is None:
            likeliest_S: Tensor = self._kernels.greedy(logits_SV, self._num_nan)
            return likeliest_S
        settings = [None if value is None else value.expand(len(logits_SV)) for value in self._settings]
        drawn_S: Tensor = self._kernels.sample_top_k_top_p(logits_SV, draws_S, *settings, self._num_nan)
        return drawn_S

    def candidates(self, logits_RV: Tensor, count: int) -> list[list[int]]:
        if count == 1:
            return [[token] for token in self.choose(logits_RV, None).tolist()]
        return list(logits_RV.topk(count, dim=-1).indices.tolist())
