"""How files lay out what is computed otherwise: rotated pairs, fused products, interleaved gates, experts in MXFP4."""

__all__ = ["halved", "rotated_rows", "split_pairs"]

import torch
from torch import Tensor

from perfmodel.models.rope import Rope

_E8M0_BIAS = 127


def rotated_rows(rows: Tensor, num_heads: int, rope: Rope | None) -> Tensor:
    """Rows of `num_heads` heads, [N * H, ...] (or of one, for a norm), as our rotation pairs them: (i, i + H/2).

    A file pairs (i, i + d/2) of the first d elements, or their neighbours; those that do not rotate fill the halves.
    """
    if rope is None:
        return rows
    dim = rows.shape[0] // num_heads
    order = _order(dim, rope)
    return rows if order is None else rows.view(num_heads, dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _order(head_dim: int, rope: Rope) -> Tensor | None:
    rotated = head_dim if rope.dim is None else rope.dim
    if rotated == head_dim and not rope.is_interleaved:
        return None
    places = torch.arange(rotated)
    first, second = (places[0::2], places[1::2]) if rope.is_interleaved else places.chunk(2)
    rest = torch.arange(rotated, head_dim).chunk(2) if rotated < head_dim else (places[:0], places[:0])
    return torch.cat((first, rest[0], second, rest[1]))


def split_pairs(rows: Tensor, dim: int) -> Tensor:
    """Gates and ups that lie in turn along `dim`, as [gates | ups]."""
    places = torch.arange(rows.shape[dim], device=rows.device)
    return rows.index_select(dim, torch.cat((places[0::2], places[1::2])))


def halved(q_and_gate: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Rows that hold each head's query and then its gate, as all queries and all gates (Qwen3-Next)."""
    heads = q_and_gate.view(num_heads, 2, -1, *q_and_gate.shape[1:])
    return heads[:, 0].reshape(-1, *q_and_gate.shape[1:]), heads[:, 1].reshape(-1, *q_and_gate.shape[1:])
