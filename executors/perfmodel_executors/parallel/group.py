"""`TensorGroup`: the ranks that compute one step together, as the decoder sees them.

For a single rank every call returns what it got, so the decoder has one form.
"""

__all__ = ["ALONE", "Alone", "DistributedGroup", "TensorGroup", "embed"]

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from perfmodel_executors.kernels.weight_formats import GgufWeight, table_rows


class TensorGroup(Protocol):
    """`rank` of `size` ranks; every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' `partial`, on every rank."""
        ...

    def gather(self, shard_SV: Tensor, size: int) -> Tensor:
        """All ranks' columns side by side, cut to `size`, on every rank."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, shard_SV: Tensor, size: int) -> Tensor:
        return shard_SV


ALONE = Alone()


class DistributedGroup:
    """The default process group of torch.distributed (NCCL between GPUs, Gloo between CPU processes)."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce(self, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        dist.all_reduce(partial)
        return partial

    def gather(self, shard_SV: Tensor, size: int) -> Tensor:
        parts = [torch.empty_like(shard_SV) for _ in range(self.size)]
        dist.all_gather(parts, shard_SV.contiguous())
        return torch.cat(parts, dim=-1)[..., :size]


def embed(embedding_VC: Tensor | GgufWeight, tokens_T: Tensor, group: TensorGroup, dtype: torch.dtype) -> Tensor:
    """[T, C]: rows of a table of which each rank holds an equal number, in order; the others' rows count as zeros.

    embedding_VC: as it is stored
    tokens_T:     ids of the whole vocabulary
    group:        the ranks that share the table
    dtype:        of what is dequantised
    """
    if group.size == 1:
        return table_rows(embedding_VC, tokens_T, dtype)
    held = embedding_VC.shape[0]
    local_T = tokens_T - group.rank * held
    is_held_T = (local_T >= 0) & (local_T < held)
    rows_TC = table_rows(embedding_VC, local_T.clamp(0, held - 1), dtype)
    return group.all_reduce(rows_TC * is_held_T[:, None])
