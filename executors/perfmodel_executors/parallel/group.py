"""`TensorGroup`: the ranks that compute one step together; a single one gets back what it gives."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from perfmodel.ops.sharding import stages
from perfmodel_executors.kernels.stored_rows import table_rows
from perfmodel_executors.kernels.weight_formats import GgufWeight
from perfmodel_executors.parallel.experts import ExpertSharing, LocalExperts


class PipelineStage(NamedTuple):
    number: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        return stages(num_layers, self.num_stages)[self.number]


ONLY_STAGE = PipelineStage()


class TensorGroup:
    """`rank` of `size` ranks, which all make the same calls in the same order; this one is alone. experts: how whole
    experts are shared out, over `num_expert_ranks`; None: each is cut by its width. sends_tokens: data-parallel ranks,
    which have tokens of their own and are of size 1 but for their experts. num_stripes: neighbours that share out the
    tokens of their KV heads, of which this is number `stripe`."""

    rank = 0
    size = 1
    place: tuple[int, int] | None = None  # (rank, size) of those that share experts, where they are others
    experts: ExpertSharing | None = None
    stage = ONLY_STAGE
    sends_tokens = False
    num_stripes = 1

    @property
    def stripe(self) -> int:
        return self.rank % self.num_stripes

    def gather_stripes(self, part: Tensor) -> list[Tensor]:
        """The tensors of the ranks that share out tokens with this one, in order."""
        raise AssertionError("KV is not striped")

    def scatter_stripes(self, parts_R: Tensor) -> Tensor:
        """The sum over these ranks of the tensor that each of them has for this one."""
        raise AssertionError("KV is not striped")

    @property
    def expert_rank(self) -> int:
        return self.rank if self.place is None else self.place[0]

    @property
    def num_expert_ranks(self) -> int:
        return self.size if self.place is None else self.place[1]

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, shard_SV: Tensor, size: int) -> Tensor:
        """All ranks' columns side by side, cut to `size`, on every rank."""
        return shard_SV

    def exchange(self, rows_SB: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """counts: how many of the rows go to each rank, in order; what comes, and how many from each."""
        return rows_SB, list(counts)

    def pass_on(self, state_2TC: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def receive(self, state_2TC: Tensor) -> None:
        raise AssertionError("there is no other stage")


ALONE = TensorGroup()


class DistributedGroup(TensorGroup):
    """The default process group of torch.distributed (NCCL between GPUs, Gloo between CPU processes): the ranks of a
    tensor-parallel group, or pipeline stages or data-parallel ranks of one rank each. log: told of each message."""

    def __init__(
        self,
        log: "MessageLog",
        experts: ExpertSharing | None = None,
        has_stages: bool = False,
        sends_tokens: bool = False,
        num_stripes: int = 1,
    ) -> None:
        self.place = number, count = dist.get_rank(), dist.get_world_size()
        self.rank, self.size = (0, 1) if has_stages or sends_tokens else self.place
        self.stage = PipelineStage(number, count) if has_stages else ONLY_STAGE
        self.experts, self.sends_tokens, self._log = experts, sends_tokens, log
        self.num_stripes = num_stripes
        if num_stripes > 1:  # which all ranks make alike
            starts = range(0, count, num_stripes)
            groups = [dist.new_group(list(range(start, start + num_stripes))) for start in starts]
            self._striped = groups[number // num_stripes]

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self.size == 1:
            return partial
        partial = partial.contiguous()
        dist.all_reduce(partial)
        self._log.add("all_reduce", partial.nbytes)
        return partial

    def gather(self, shard_SV: Tensor, size: int) -> Tensor:
        if self.size == 1:
            return shard_SV
        parts = [torch.empty_like(shard_SV) for _ in range(self.size)]
        dist.all_gather(parts, shard_SV.contiguous())
        self._log.add("all_gather", shard_SV.nbytes * self.size)
        return torch.cat(parts, dim=-1)[..., :size]

    def exchange(self, rows_SB: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        sent = torch.tensor(counts, device=rows_SB.device)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        numbers: list[int] = came.tolist()
        arrived_RB = rows_SB.new_empty(sum(numbers), rows_SB.shape[1])
        dist.all_to_all_single(arrived_RB, rows_SB.contiguous(), numbers, list(counts))
        self._log.add("all_to_all", rows_SB.nbytes)
        return arrived_RB, numbers

    def gather_stripes(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.num_stripes)]
        dist.all_gather(parts, part.contiguous(), group=self._striped)
        self._log.add("all_gather", part.nbytes * self.num_stripes)
        return parts

    def scatter_stripes(self, parts_R: Tensor) -> Tensor:
        own = torch.empty_like(parts_R[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(own, [part.contiguous() for part in parts_R], group=self._striped)
        self._log.add("reduce_scatter", parts_R.nbytes)
        return own

    def pass_on(self, state_2TC: Tensor) -> None:
        dist.send(state_2TC, self.stage.number + 1)
        self._log.add("send_recv", state_2TC.nbytes)

    def receive(self, state_2TC: Tensor) -> None:
        dist.recv(state_2TC, self.stage.number - 1)
        self._log.add("send_recv", state_2TC.nbytes)


class MessageLog:
    """The messages of a rank's step (kind, payload bytes as in `perfmodel.ops.messages`), and CPU time between them."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, int]] = []
        self._marks = [0]

    def begin(self) -> None:
        self.messages = []
        self._marks = [time.thread_time_ns()]

    def add(self, kind: str, num_bytes: int) -> None:
        self.messages.append((kind, num_bytes))
        self._marks.append(time.thread_time_ns())

    def end(self) -> list[int]:
        """Nanoseconds of this thread's CPU time up to each message, and behind the last; waiting takes none."""
        marks = [*self._marks, time.thread_time_ns()]
        return [after - before for before, after in pairwise(marks)]


def exchanged(
    group: TensorGroup,
    local: LocalExperts,
    x_TC: Tensor,
    routing: tuple[Tensor, Tensor],
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """[T, C]: what the experts of all ranks add to this rank's tokens: dispatch, experts, combine. A token goes once to
    each rank that has one of its experts, with their slots and weights; one sum comes back. multiply: what rows get of
    the experts of their slots here (-1: none), by weight."""
    weights_TX, experts_TX = routing
    ranks_TX, slots_TX = local.homes(experts_TX)
    parts = [torch.nonzero((ranks_TX == rank).any(dim=1)).flatten() for rank in range(group.num_expert_ranks)]
    counts, tokens_S = [len(part) for part in parts], torch.cat(parts)
    ranks_S = torch.repeat_interleave(torch.tensor(counts, device=x_TC.device))
    slots_SX = torch.where(ranks_TX[tokens_S] == ranks_S[:, None], slots_TX[tokens_S], -1)
    columns = (x_TC[tokens_S], weights_TX[tokens_S].float(), slots_SX.int())
    sizes = [column.shape[1] * column.element_size() for column in columns]
    arrived_RB, came = group.exchange(torch.cat([column.view(torch.uint8) for column in columns], dim=1), counts)
    arrived = zip(torch.split(arrived_RB, sizes, dim=1), columns, strict=True)
    x_RC, weights_RX, slots_RX = (part.contiguous().view(column.dtype) for part, column in arrived)
    y_SC, _ = group.exchange(multiply(x_RC, weights_RX, slots_RX.long()), came)
    return torch.zeros_like(x_TC).index_add_(0, tokens_S, y_SC)


def embed(embedding_VC: Tensor | GgufWeight, tokens_T: Tensor, group: TensorGroup, dtype: torch.dtype) -> Tensor:
    """[T, C]: rows of a table that ranks share out evenly, in order; the others' rows count as zeros."""
    if group.size == 1:
        return table_rows(embedding_VC, tokens_T, dtype)
    held = embedding_VC.shape[0]
    local_T = tokens_T - group.rank * held
    is_held_T = (local_T >= 0) & (local_T < held)
    rows_TC = table_rows(embedding_VC, local_T.clamp(0, held - 1), dtype)
    return group.all_reduce(rows_TC * is_held_T[:, None])
