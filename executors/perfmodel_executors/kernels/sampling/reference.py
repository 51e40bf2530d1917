"""Greedy sampling: the most likely token."""

__all__ = ["greedy"]

from torch import Tensor


def greedy(logits_SV: Tensor) -> Tensor:
    """The index of each row's largest logit, [S]; the first of equal ones."""
    return logits_SV.argmax(dim=-1)
