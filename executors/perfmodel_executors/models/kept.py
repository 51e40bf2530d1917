"""What attention keeps of a sequence beside, or instead of, the engine's blocks: tiers by age, tokens by score. All of
it lies in tensors with a row for each sequence, as the states of recurrent layers do."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel_executors.kernels.kv_pages import KVPages, Packing


class HeldTokens(NamedTuple):
    """Held, in R places of K heads: k, v [rows, K, R, H]; scores, and positions + 1 (0: empty) [rows, K, R]."""

    k: Tensor
    v: Tensor
    scores: Tensor
    places: Tensor


class Tier(NamedTuple):
    """The next older `tokens` of each sequence, as their pages are stored; newest tier first."""

    tokens: int
    dtype: torch.dtype
    packing: Packing | None


class KVTiers(NamedTuple):
    """A ring for each tier, whose blocks are the sequences' rows, and the pages of all older tokens."""

    rings: Sequence[KVPages]
    pages: KVPages
