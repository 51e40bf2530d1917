"""How tokens are drawn, by the names that files, model cards and operators share."""

__all__ = ["SamplingMethod"]

from typing import Literal

# Cheapest first. random: from the whole distribution (a temperature alone); top_k, top_p: from a part, which sorts it.
SamplingMethod = Literal["greedy", "random", "top_k", "top_p"]
