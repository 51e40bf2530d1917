"""What heads make of latents: the up-projections of each, the scale of scores; and which way of two is less work."""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

__all__ = ["LatentHeads"]

from typing import NamedTuple

from torch import Tensor


class LatentHeads(NamedTuple):
    """keys: W_k of each head, to the P elements of a key that are not rotated; values: W_v; scale: of scores."""

    keys_NPR: Tensor
    values_NVR: Tensor
    scale: float

    def absorbs(self, num_new: int, num_tokens: int) -> bool:
        """Whether a chunk of `num_new` tokens, the last of `num_tokens`, is less work with W_k and W_v absorbed.

        FLOPs of a head, with q pairs of a query and a key, of c new tokens and C in all:

            absorbed  2 (2 R + r) q + 2 R (P + V) c     expanded  2 (P + r + V) q + 2 R (P + V) C

        Absorbed pays per pair, expanded per token of context: DeepSeek-V3's heads (128, 128 and 512) break even at 171
        new tokens behind a long prefix. A prompt without a prefix is never absorbed.
        """
        (_, size, rank), value = self.keys_NPR.shape, self.values_NVR.shape[1]
        pairs = num_new * (num_tokens - (num_new - 1) / 2)
        return (2 * rank - size - value) * pairs < rank * (size + value) * (num_tokens - num_new)
