"""The next tokens of a batch of sequences."""

__all__ = ["serving", "tiny"]

from collections.abc import Callable

import torch
from torch import Tensor

from perfmodel.ops.elementwise import sample
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.sampling.reference import DRAW_BITS, greedy, sample_top_k_top_p

_VOCABULARIES = (32000, 128256)
# Share of tokens that may differ: exponentials differ in the last bit, and a drawn number may fall just beside.
_TOLERANCE = 0.01


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Vocabularies that no block divides, of one piece and of several; a row with logits that are no numbers."""
    return [
        _problem("greedy", 3, 100, dtype),
        _problem("greedy", 2, 9000, dtype, num_nan=5000),
        _problem("sample_top_k_top_p", 7, 150, dtype, num_nan=60),
        _problem("sample_top_k_top_p", 7, 9000, dtype),
    ]


def serving() -> list[Problem]:
    """A batch of one to a full one."""
    names = ("greedy", "sample_top_k_top_p")
    return [_problem(name, s, v, torch.float32) for name in names for v in _VOCABULARIES for s in (1, 32, 256)]


def _problem(operator: str, rows: int, vocab: int, dtype: torch.dtype, num_nan: int = 0) -> Problem:
    """num_nan: leading logits of the last row that are no numbers"""

    def make(inputs: Inputs) -> tuple[Tensor | None, ...]:
        logits_SV = inputs.normal(rows, vocab, dtype=dtype, scale=2.0)
        if num_nan:
            logits_SV[-1, :num_nan] = float("nan")
        count = inputs.integers(0, 1, 1)
        if operator == "greedy":
            return (logits_SV, count)
        # In turn: greedy, everything, top-k, top-p, both at two temperatures, min-p.
        columns = (
            ((0.0, 1.0, 0.7, 1.0, 1.3, 0.8, 1.0), torch.float32),
            ((0, 0, 20, 0, 50, 5, 0), torch.int32),
            ((1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 1.0), torch.float32),
            ((0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.2), torch.float32),
        )
        settings = [inputs.of([values[row % 7] for row in range(rows)], kind) for values, kind in columns]
        return logits_SV, inputs.integers(0, 1 << DRAW_BITS, rows), *settings, count

    baselines: dict[str, Callable[..., Tensor]] = {"greedy": greedy, "sample_top_k_top_p": sample_top_k_top_p}
    return Problem(
        operator,
        {"samples": rows, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")},
        make,
        sample(rows, vocab, "greedy" if operator == "greedy" else "top_p"),
        0.0 if operator == "greedy" or vocab < min(_VOCABULARIES) else _TOLERANCE,
        {"torch": baselines[operator]},
    )
