"""What an hour of a device costs, and a million tokens."""

__all__ = ["usd_per_hour", "usd_per_million_tokens"]

from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import PriceOverride


def usd_per_hour(hardware: HardwareSpec, override: PriceOverride | None = None) -> float | None:
    """Price of a device hour: the scenario's if it has one, else the hardware file's; None if neither knows."""
    if override is not None:
        return override.usd_per_gpu_hour
    return hardware.price.usd_per_hour if hardware.price else None


def usd_per_million_tokens(device_usd_per_hour: float, num_devices: int, tokens_per_s: float) -> float:
    """USD for a million tokens at a steady `tokens_per_s`: 1e6 price devices / (3600 rate). Infinite at rate 0."""
    if tokens_per_s <= 0:
        return float("inf")
    return 1e6 * device_usd_per_hour * num_devices / (3600 * tokens_per_s)
