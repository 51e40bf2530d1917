"""`transferred`: the fit of a kernel on one device, as it is on another of which nobody measured that kernel.

Fractions of declared peaks stay. Seconds (fields `..._s`: launches, prologues, hops of a protocol) follow the clock. A
block's fixed cost counted in key tokens is a time as well: it follows the clock and what a token costs on one compute
unit. Devices of one architecture with another memory (H100 -> H200) differ by the declared bandwidth only.
"""

__all__ = ["transferred"]

from typing import Any, TypeVar

from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.files.base import Spec

FitT = TypeVar("FitT", bound=Spec)

_NOT_OF_THE_DEVICE = {"eager_floor_s", "eager_launch_s", "link_latency_s"}  # the host's, and a declared figure
_IN_KEY_TOKENS = {"block_tokens"}


def transferred(fit: FitT, source: DeviceFacts, target: DeviceFacts, time_ratio: float | None = None) -> FitT:
    """`fit`, made on `source`, for `target`; values stay within their plausible ranges.

    time_ratio: seconds on the target per second on the source; by default the ratio of the declared clocks
    """
    ratio = source.clock_hz / target.clock_hz if time_ratio is None else time_ratio
    rate = getattr(fit, "rate", None) or "bf16"
    per_unit = (target.peak(rate) / target.compute_units) / (source.peak(rate) / source.compute_units)
    update: dict[str, Any] = {}
    for name, value in fit:
        if isinstance(value, Spec) and name == "beyond":
            update[name] = transferred(value, source, target, ratio)
        elif isinstance(value, float) and name.endswith("_s") and name not in _NOT_OF_THE_DEVICE:
            update[name] = _within(fit, name, value * ratio)
        elif isinstance(value, float) and name in _IN_KEY_TOKENS:
            update[name] = _within(fit, name, value * ratio * per_unit)
    return fit.model_copy(update=update)


def _within(fit: Spec, name: str, value: float) -> float:
    """`value` cut to the plausible range of the field."""
    for constraint in type(fit).model_fields[name].metadata:
        low, high = getattr(constraint, "ge", None), getattr(constraint, "le", None)
        value = value if low is None else max(value, float(low))
        value = value if high is None else min(value, float(high))
    return value
