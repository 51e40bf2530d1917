"""Early exit, executed: a decoded token leaves between two layers, and what it left out gets its keys and values. A
layer runs on the rows that come to it, and not at all where none does. Keys and values of later layers are made of the
state that a row left with (Schuster et al. 2022, section 3.1), and so are its logits. Prompts pass all layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from perfmodel.engine import Request
from perfmodel.models.spec import ExitSpec
from perfmodel.sim.traffic.distributions import uniform_draws
from perfmodel_executors.models.batch import StepBatch


class DrawnExits:
    """Draws from `seed`: a token's is a hash of request and position, whoever runs beside it."""

    def __init__(self, exits: ExitSpec, seed: int) -> None:
        self._reach, self._seed = exits.reach, seed
        self._draws: dict[int, list[float]] = {}
        self.num_tokens = self.num_layers = 0

    def pass_layers(self, request: Request, position: int) -> int:
        """Layers for the token at `position`, whose next one is an output token."""
        own = request.request_id
        if own not in self._draws:
            self._draws[own] = list(map(float, uniform_draws(self._seed, own, request.max_output_tokens)))
        draw = self._draws[own][position + 1 - request.num_prompt_tokens]
        count = sum(draw < share for share in self._reach)
        self.num_tokens += 1
        self.num_layers += count
        return count

    def release(self, request: Request) -> None:
        self._draws.pop(request.request_id, None)

    def in_words(self) -> str:
        total = self.num_tokens * len(self._reach)
        return f"Decoded tokens passed {self.num_layers / max(total, 1):.0%} of the layers."


def leave_early(
    batch: StepBatch,
    num_layers: int,
    run_layers: Callable[[StepBatch, int, int, Tensor | None], Tensor],
    fill_cache: Callable[[int, Tensor, Tensor, Tensor], None],
    ask_head: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """The last states of all rows, [T, C], of decodes that pass `num_layers_D` layers each, at least one. run_layers:
    of (rows, first layer, the one to stop before, [R, C] states, None: embedded); fill_cache: writes keys and values of
    (layer, [R, C] states, positions, slots); ask_head: gets decodes' states behind each layer but the last."""
    assert batch.num_layers_D is not None
    depths = [min(depth, num_layers) for depth in batch.num_layers_D]
    stops = range(1, num_layers + 1) if ask_head is not None else sorted({*depths, num_layers})
    x_TC = run_layers(batch, 0, stops[0], None)
    rows, part, num_staying = torch.arange(len(x_TC), device=x_TC.device), batch, len(depths)
    for first, stop in pairwise(stops):
        if ask_head is not None and num_staying:
            ask_head(x_TC[rows[:num_staying]])
        staying = [row for row, depth in enumerate(depths) if depth > first]
        if len(staying) < num_staying:
            num_staying, (part, rows) = len(staying), _without(batch, staying)
        if len(rows) == len(x_TC):
            x_TC = run_layers(batch, first, stop, x_TC)
        elif len(rows):
            x_TC = x_TC.index_copy(0, rows, run_layers(part, first, stop, x_TC[rows]))
    # Keys and values of the rows that have left, layer by layer for all of them together.
    for first, stop in pairwise(sorted({*depths, num_layers})):
        gone = torch.tensor([row for row, d in enumerate(depths) if d <= first], device=x_TC.device)
        x_RC, positions_R, slots_R = x_TC[gone], batch.positions_T[gone], batch.slots_T[gone]
        for index in range(first, stop):
            fill_cache(index, x_RC, positions_R, slots_R)
    return x_TC


def _without(batch: StepBatch, staying: Sequence[int]) -> tuple[StepBatch, Tensor]:
    """The batch with these of its decodes, and its chunks, and the rows they have; nothing is sampled from it."""
    split, device = batch.num_decodes, batch.tokens_T.device
    kept = torch.tensor(staying, dtype=torch.int64, device=device)
    rows = torch.cat((kept, torch.arange(split, len(batch.tokens_T), device=device)))
    in_ring = batch.kept_W
    if in_ring is not None:  # decodes always stay in the ring
        in_ring = torch.cat((torch.arange(len(kept), device=kept.device), in_ring[split:] - split + len(kept)))
    own = {name: getattr(batch, name)[rows] for name in ("tokens_T", "positions_T", "slots_T")}
    own |= {name: getattr(batch, name)[kept] for name in ("tables_DM", "contexts_D")}
    return replace(batch, **own, sample_rows_S=batch.sample_rows_S[:0], kept_W=in_ring, num_layers_D=None), rows
