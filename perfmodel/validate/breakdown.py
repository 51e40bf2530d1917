"""Where the time of a prediction is, and what would have to change for it to meet the measurement.

A breakdown is {"parts": {name: share}, "why": sentence, ...}. Shares are of the prediction and add up to one; the
sentence takes the largest part alone to blame, which says how plausible that is: a GEMM that would have to take a
twentieth of its time is not what is wrong.
"""

__all__ = ["kernel_breakdown", "message_breakdown", "why"]

from collections.abc import Mapping
from typing import Any

_NOTHING = 0.05  # of a part: as good as leaving it out
_CLOSE = 0.02  # of the measured value: nothing to explain below


def why(predicted: float, measured: float, shares: Mapping[str, float], whole: str) -> str:
    """The largest part, and by what factor it alone would have to change for `predicted` to be `measured` (same unit).

    shares: of each part in the prediction, which is called `whole`
    """
    ratio = measured / predicted
    head = f"measured {ratio:.2f}x predicted"
    name, share = max(shares.items(), key=lambda item: item[1])
    if abs(ratio - 1) < _CLOSE or share <= 0:
        return head
    factor = 1 + (ratio - 1) / share
    largest = f"{share:.0%} of {whole} is {name}"
    if factor < _NOTHING:
        return f"{head}: {largest}; without it the prediction would still be {(1 - share) / ratio:.2f}x the measurement"
    return f"{head}: {largest}; it would have to take {factor:.2f}x"


def kernel_breakdown(predicted: float, measured: float, compute: float, memory: float) -> dict[str, Any]:
    """Parts of a kernel's time: seconds of each resource alone (they overlap), its bound, and its overhead.

    predicted, measured: seconds; compute, memory: predicted seconds of each resource
    """
    longest = max(compute, memory)
    overhead = max(0.0, predicted - longest)
    bound = "memory" if memory >= compute else "compute"
    shares = {bound: min(longest, predicted) / predicted, "overhead": overhead / predicted}
    return {
        "parts": shares,
        "compute_s": compute,
        "memory_s": memory,
        "overhead_s": overhead,
        "bound": max(shares, key=lambda name: shares[name]),
        "why": why(predicted, measured, shares, "the kernel"),
    }


def message_breakdown(predicted: float, measured: float, wire: float) -> dict[str, Any]:
    """Parts of a message's time: its bytes on the wire, and the rest, launches and hops."""
    shares = {"communication": min(wire / predicted, 1.0), "overhead": max(0.0, 1 - wire / predicted)}
    bound = max(shares, key=lambda name: shares[name])
    return {
        "parts": shares,
        "communication_s": wire,
        "overhead_s": max(0.0, predicted - wire),
        "bound": bound,
        "why": why(predicted, measured, shares, "the message"),
    }
