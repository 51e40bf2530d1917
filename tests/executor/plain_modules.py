"""A decoder layer in plain PyTorch, as Hugging Face's modules write it, and what of it launches kernels.

The layers' tensors are laid out and cast as there; nothing here is imported by the program.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softmax
from torch.utils._python_dispatch import TorchDispatchMode

Cache = tuple[torch.Tensor, torch.Tensor]
# Of a Python program's operators those that only make another view of a tensor.
_VIEWS = {"view", "_unsafe_view", "t", "transpose", "unsqueeze", "slice", "expand", "select", "unbind"}


class KernelCount(TorchDispatchMode):
    """Kernels launched, and bytes that they read and write, each tensor as often as it is an argument or a result."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels = 0
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _VIEWS:
            self.num_kernels += 1
            self.num_bytes += _num_bytes((args, kwargs)) + _num_bytes(found)
        return found


def _num_bytes(value: Any) -> int:
    """Of all tensors in nested arguments; repeated elements of an expanded one are read once."""
    if isinstance(value, torch.Tensor):
        sizes = zip(value.shape, value.stride(), strict=True)
        elements = 1
        for size, stride in sizes:
            elements *= size if stride else 1
        return elements * value.element_size()
    if isinstance(value, dict):
        value = tuple(value.values())
    return sum(map(_num_bytes, value)) if isinstance(value, (tuple, list)) else 0


def counted(run: Callable[[], Any]) -> KernelCount:
    """What `run` launches; without gradients, not in inference mode, which would not show what linear layers do."""
    with torch.no_grad(), KernelCount() as count:
        run()
    return count


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * x.to(dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_half(x) * sin


def repeat_kv(x_BKTD: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, tokens, dim = x_BKTD.shape
    if times == 1:
        return x_BKTD
    return x_BKTD[:, :, None].expand(batch, heads, times, tokens, dim).reshape(batch, heads * times, tokens, dim)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Queries (batch, heads, tokens, dim) over keys of fewer heads; (batch, tokens, heads, dim)."""
    times = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, times), repeat_kv(v, times)
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden, n * dim, bias=False) for n in (heads, kv_heads, kv_heads)
        )
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

    def forward(self, x: torch.Tensor, cache: Cache, table: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            project(x).view(batch, tokens, -1, self.dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, table, table), rotated(k, table, table)
        k, v = torch.cat((cache[0], k), dim=-2), torch.cat((cache[1], v), dim=-2)
        return self.o_proj(attend(q, k, v, mask).reshape(batch, tokens, -1))


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int, intermediate: int) -> None:
        super().__init__()
        self.input_norm, self.post_attention_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads, kv_heads, dim), GatedMLP(hidden, intermediate)

    def forward(self, x: torch.Tensor, cache: Cache, table: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), cache, table, mask)
        return x + self.mlp(self.post_attention_norm(x))


def routed(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the chosen experts, and who chose whom, (experts, top_k, tokens)."""
    weights, chosen = torch.topk(softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype)
    mask = torch.zeros(*chosen.shape, logits.shape[-1], dtype=torch.int64)
    mask.scatter_(-1, chosen.unsqueeze(-1), 1)  # torch.nn.functional.one_hot without its check on a CPU
    return weights, mask.transpose(0, 2)


def sum_of_experts(
    x: torch.Tensor, experts: list[nn.Module], weights: torch.Tensor, mask: torch.Tensor, total: torch.Tensor
) -> None:
    """Adds what the chosen experts make of the tokens of `x` to `total`."""
    for expert, choices in zip(experts, mask, strict=True):
        place, token = torch.where(choices)
        total.index_add_(0, token, expert(x[token]) * weights[token, place, None])
