"""`Usage`: what a device did over a run."""

__all__ = ["Usage"]

from dataclasses import dataclass, field


@dataclass(slots=True)
class Usage:
    """What the device did over a run: totals per device, and seconds by what bounded each operator."""

    flops: float = 0.0
    peak_compute_s: float = 0.0  # what the FLOPs take at the declared peak rates
    hbm_bytes: float = 0.0
    unspent_compute_s: float = 0.0  # of `peak_compute_s`, by how much less energy a FLOP took at a lower clock
    bound_s: dict[str, float] = field(
        default_factory=lambda: {"compute": 0.0, "memory": 0.0, "communication": 0.0, "overhead": 0.0}
    )

    @property
    def busy_s(self) -> float:
        return sum(self.bound_s.values())

    def add(self, other: "Usage", times: float) -> None:
        """Add `times` times `other`."""
        self.flops += times * other.flops
        self.peak_compute_s += times * other.peak_compute_s
        self.hbm_bytes += times * other.hbm_bytes
        self.unspent_compute_s += times * other.unspent_compute_s
        for bound, seconds in other.bound_s.items():
            self.bound_s[bound] += times * seconds
