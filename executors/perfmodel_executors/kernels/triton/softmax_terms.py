"""Caps and sinks of a running softmax, whose scores are in units of log2.

    capped: c tanh(s / c) = c (1 - 2 / (exp(2 s / c) + 1))    Gemma 2, section 2
    sink:   a logit of each query head that takes its part of the softmax and has no value (gpt-oss)

A sink is where the running softmax begins: its logit is the largest so far, and the sum is one.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """Scores in units of log2, capped at `CAP` in natural ones. No overflow: an infinite power leaves the cap."""
    power = tl.exp2(scores * (2.0 / CAP))
    return (CAP * _LOG2_E) * (1.0 - 2.0 / (power + 1.0))


@triton.jit
def begin_softmax(sinks_ptr, query_head, has_sink, LEAST: tl.constexpr, ROWS: tl.constexpr):
    """(largest score, sum of powers) [ROWS] before any key: those of the sinks of rows that have one."""
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + query_head, mask=has_sink, other=0.0).to(tl.float32)
        largest = tl.where(has_sink, sink * _LOG2_E, largest)
        total = tl.where(has_sink, 1.0, total)
    return largest, total
