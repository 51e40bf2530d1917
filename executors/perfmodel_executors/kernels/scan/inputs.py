"""What a scan reads of its tokens, by the names of linear attention; Mamba-2's C, B, x and dt are q, k, v and beta."""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

__all__ = ["ScanInputs"]

from typing import NamedTuple

from torch import Tensor


class ScanInputs(NamedTuple):
    """The inputs of T tokens and H heads, which share G groups of queries and keys:

        S_t = a_t S_{t-1} + k_t w_t^T,    o_t = S_t^T q_t + skip v_t
        w_t = b_t v_t  (Mamba-2),    w_t = b_t (v_t - a_t S_{t-1}^T k_t)  (the gated delta rule)

    log_decay: natural logarithms of a, in fp32, as are beta b and skip
    erases:    the delta rule: what a key holds goes when something new is written to it
    chunk:     tokens that the definition takes at once; kernels have tiles of their own
    """

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    log_decay_TH: Tensor
    beta_TH: Tensor
    skip_H: Tensor | None
    erases: bool
    chunk: int

    def tokens(self, which: slice) -> "ScanInputs":
        """Those of some tokens."""
        return self._replace(
            q_TGK=self.q_TGK[which],
            k_TGK=self.k_TGK[which],
            v_THV=self.v_THV[which],
            log_decay_TH=self.log_decay_TH[which],
            beta_TH=self.beta_TH[which],
        )
