"""Choosing the next token from the logits."""

__all__ = ["BYTES_PER_LOGIT", "sample"]

from perfmodel.errors import SpecError
from perfmodel.ops.work import Work

# HBM traffic per logit. greedy: cast to fp32 (2 read, 4 written), argmax (4 read): counted. The others sort the
# vocabulary and walk it some thirty times (sort with indices, softmax, cumulative sum, masks, scatter, noise, argmax):
# 460 is measured, as the slope of step time over sequences of servers whose models ask for top-p, on three GPUs
# (18, 29 and 68 us per sequence at 128k logits scale as one over bandwidth).
BYTES_PER_LOGIT = {"greedy": 10.0, "random": 60.0, "top_k": 460.0, "top_p": 460.0}
_KERNELS = {"greedy": 2, "random": 6, "top_k": 20, "top_p": 20}


def sample(num_samples: float, vocab_size: int, method: str = "greedy", bytes_per_logit: float | None = None) -> Work:
    """One token for each of `num_samples` rows of `vocab_size` logits: B V x bytes, of the method unless given.

    Every tensor-parallel rank holds the gathered logits and samples for itself. Source: BYTES_PER_LOGIT.

    Raises SpecError for a method that is none of perfmodel.models.spec.SamplingMethod.
    """
    if method not in BYTES_PER_LOGIT:
        raise SpecError(f"sampling: found {method!r}, allowed {', '.join(BYTES_PER_LOGIT)}.")
    per_logit = BYTES_PER_LOGIT[method] if bytes_per_logit is None else bytes_per_logit
    logits = num_samples * vocab_size
    return Work(
        "sample",
        "sampling",
        flops=2.0 * logits,
        rate="vector",
        activation_bytes=per_logit * logits,
        num_kernels=_KERNELS[method] if num_samples else 0,
    )
