"""How near measured kernels come to what the device can do, and to the best library call: a sentence per operator.

The limit of a problem is the larger of its bytes over the measured copy bandwidth and its FLOPs over the measured rate
of a library product in the same format: figures of the same device in the same run.
"""

__all__ = ["KernelRates", "kernel_rates", "rate_notes"]

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from perfmodel.calibrate.measured import Ceilings, KernelRecord, Measurements


@dataclass(frozen=True)
class KernelRates:
    """Rates of one problem: share of the limit that is reached, its bound, and its speedup over the baseline."""

    record: KernelRecord
    limit_share: float | None
    bound: str  # memory | compute
    speedup: float | None


def kernel_rates(record: KernelRecord, ceilings: Ceilings) -> KernelRates:
    """The rates of one measured problem."""
    memory = record.bytes / ceilings.bandwidth if ceilings.bandwidth else 0.0
    rate = ceilings.rate(record.rate)
    compute = record.flops / rate if rate else 0.0
    limit = max(memory, compute)
    return KernelRates(
        record,
        limit / record.seconds if limit > 0 else None,
        "memory" if memory >= compute else "compute",
        record.baseline_s / record.seconds if record.baseline_s else None,
    )


def rate_notes(measured: Measurements) -> Iterator[str]:
    """One sentence per operator, wrong results first."""
    yield from _wrong(measured)
    by_operator: dict[str, list[KernelRates]] = {}
    for record in measured.kernels:
        by_operator.setdefault(record.operator, []).append(kernel_rates(record, measured.info.ceilings))
    for operator, rates in sorted(by_operator.items()):
        shares = [each for each in rates if each.limit_share is not None]
        if not shares:
            continue
        best = max(shares, key=lambda each: each.limit_share or 0.0)
        sentence = (
            f"{operator}: {median(each.limit_share or 0.0 for each in shares):.0%} of the limit (median of "
            f"{len(shares)}), at best {best.limit_share:.0%} of {best.bound} at {best.record.label}"
        )
        speedups = [each.speedup for each in rates if each.speedup is not None]
        yield sentence + (f"; {median(speedups):.2f} times the library's speed." if speedups else ".")
    if measured.info.left_out:
        yield f"{len(measured.info.left_out)} tasks did not fit the time budget."


def _wrong(measured: Measurements) -> Iterator[str]:
    for record in measured.kernels:
        if record.error is not None and record.tolerance is not None and not record.error <= record.tolerance:
            yield (
                f"WRONG RESULT: {record.label} differs from its reference by {record.error:.2g} of the largest "
                f"value, allowed {record.tolerance:.2g}."
            )
