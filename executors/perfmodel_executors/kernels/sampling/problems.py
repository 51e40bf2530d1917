"""The next tokens of a batch of sequences."""

__all__ = ["serving", "tiny"]

from collections.abc import Callable

import torch
from torch import Tensor

from perfmodel.ops.elementwise import sample
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.sampling.reference import greedy, sample_top_k_top_p

_VOCABULARIES = (32000, 128256)
# Share of tokens that may differ: the kernel sums probabilities in fp32, the reference in fp64, and where they are as
# small as 1e-5 a drawn number may fall just beside.
_TOLERANCE = 0.05


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Vocabularies that no block divides, of one piece and of several."""
    return [
        _problem("greedy", 3, 100, dtype),
        _problem("greedy", 2, 9000, dtype),
        _problem("sample_top_k_top_p", 6, 150, dtype),
        _problem("sample_top_k_top_p", 4, 9000, dtype),
    ]


def serving() -> list[Problem]:
    """A batch of one to a full one."""
    names = ("greedy", "sample_top_k_top_p")
    return [_problem(name, s, v, torch.float32) for name in names for v in _VOCABULARIES for s in (1, 32, 256)]


def _problem(operator: str, rows: int, vocab: int, dtype: torch.dtype) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor, ...]:
        logits_SV = inputs.normal(rows, vocab, dtype=dtype, scale=2.0)
        if operator == "greedy":
            return (logits_SV,)
        # In turn: greedy, everything, top-k, top-p, both at two temperatures.
        temperatures = [(0.0, 1.0, 0.7, 1.0, 1.3, 0.8)[row % 6] for row in range(rows)]
        top_k = [(0, 0, 20, 0, 50, 5)[row % 6] for row in range(rows)]
        top_p = [(1.0, 1.0, 1.0, 0.9, 0.8, 0.5)[row % 6] for row in range(rows)]
        uniforms = [(row * 0.618 + 0.3) % 1.0 for row in range(rows)]
        integers = inputs.of(top_k, torch.int32)
        return (
            logits_SV,
            inputs.of(temperatures, torch.float32),
            integers,
            *(inputs.of(values, torch.float32) for values in (top_p, uniforms)),
        )

    baselines: dict[str, Callable[..., Tensor]] = {"greedy": greedy, "sample_top_k_top_p": sample_top_k_top_p}
    return Problem(
        operator,
        {"samples": rows, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")},
        make,
        sample(rows, vocab, "greedy" if operator == "greedy" else "top_p"),
        0.0 if operator == "greedy" or vocab < min(_VOCABULARIES) else _TOLERANCE,
        {"torch": baselines[operator]},
    )
