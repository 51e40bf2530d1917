"""`TokenChooser`: from logits to tokens, greedily or as drawn, and what it met that no model should compute."""

import torch
from torch import Tensor

from perfmodel_executors.kernels import Kernels
from perfmodel_executors.sampling import SamplingSettings


class TokenChooser:
    """Chooses on `device` without asking it anything, so that a CUDA graph can hold the choice."""

    def __init__(self, kernels: Kernels, device: torch.device, settings: SamplingSettings | None = None) -> None:
        self.settings = settings
        self._kernels = kernels
        self._num_nan = torch.zeros(1, dtype=torch.int64, device=device)
        drawn = settings or SamplingSettings()

        def setting(value: float, is_used: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.tensor([value], dtype=dtype, device=device) if is_used else None

        self._settings = (
            setting(drawn.temperature, True),
            setting(drawn.top_k, drawn.top_k > 0, torch.int32),
            setting(drawn.top_p, drawn.top_p < 1),
            setting(drawn.min_p, drawn.min_p > 0),
        )

    @property
    def num_nan(self) -> int:
        """Logits so far that were not numbers. Waits for the device."""
        return int(self._num_nan)

    def choose(self, logits_SV: Tensor, draws_S: Tensor | None) -> Tensor:
        """[S]: the likeliest tokens, or those that the random numbers draw where there are settings to draw by."""
        if draws_S is None or self.settings is None:
            likeliest_S: Tensor = self._kernels.greedy(logits_SV, self._num_nan)
            return likeliest_S
        rows = len(logits_SV)
        settings = [None if each is None else each.expand(rows) for each in self._settings]
        drawn_S: Tensor = self._kernels.sample_top_k_top_p(logits_SV, draws_S, *settings, self._num_nan)
        return drawn_S

    def candidates(self, logits_RV: Tensor, count: int) -> list[list[int]]:
        """The `count` likeliest tokens of each row, the likeliest first."""
        if count == 1:
            return [[token] for token in self.choose(logits_RV, None).tolist()]
        ranked: list[list[int]] = logits_RV.topk(count, dim=-1).indices.tolist()
        return ranked
