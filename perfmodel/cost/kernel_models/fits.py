"""What fits of all forms share: residuals, domains, and transfer between devices.

Fractions of declared peaks stay. Seconds (`..._s`: launches, prologues, hops) follow the clock; a block's fixed cost in
key tokens, also a time, follows the clock and a token's cost on one compute unit. Devices of one architecture with
other memory (H100 -> H200) differ by declared bandwidth only.

A form is one formula for one kernel's sizes (numbers) or many (columns): nested named tuples of columns, or one value
for all rows. Functions come from a namespace `xp`: numpy for tables and fits, `SCALARS` for the simulator's single
operators, some ten times faster than arrays of size one."""

import math
from collections.abc import Callable, Sequence
from math import log2
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.files.base import Spec
from perfmodel.ops.problem_sizes import KernelTraits, Values

# What it costs to be out of a domain, in doublings of the head size: another kernel is worse than another size.
_OTHER_FORMAT = 4.0
_OTHER_GROUP = 8.0


class Domain(Spec):
    """What a library picks its kernel by; None is any.

    Attention: head size, KV format, group sizes (query heads per KV head). TensorRT-LLM decodes groups of 2 to 32 with
    one kernel, others with another. Experts: their gates (2 with one, else 1), and whether ranks share them out whole.
    """

    head_dim: int | None = None
    kv_element_bytes: float | None = None
    groups: tuple[tuple[int, int], ...] = ()  # inclusive ranges; none is any
    gates: int | None = None
    expert_parallel: bool | None = None

    def distance(self, traits: KernelTraits) -> float:
        """Distance of `traits` from this domain, 0 if inside or unknown."""
        far = 0.0
        if self.head_dim and traits.head_dim:
            far += abs(log2(traits.head_dim / self.head_dim))
        if self.kv_element_bytes and traits.kv_element_bytes:
            far += _OTHER_FORMAT * abs(log2(traits.kv_element_bytes / self.kv_element_bytes))
        if self.groups and traits.group and not any(low <= traits.group < high + 1 for low, high in self.groups):
            far += _OTHER_GROUP
        if self.gates is not None and traits.gates:
            far += _OTHER_GROUP * (self.gates != traits.gates)
        if self.expert_parallel is not None and traits.gates:
            far += _OTHER_FORMAT * (self.expert_parallel != traits.shares_experts)
        return far


def distance(fit: object, traits: KernelTraits | None) -> float:
    """Distance of `traits` from a fit's domain; 0 for a fit without one."""
    domain = getattr(fit, "domain", None)
    return domain.distance(traits) if traits is not None and isinstance(domain, Domain) else 0.0


class Residuals(Spec):
    """Quantiles of log(measured / predicted) over the rows of the fit: a tenth is above by more than exp(p90) - 1."""

    num_rows: int = 0
    p10: float = 0.0
    p50: float = 0.0
    p90: float = 0.0

    def widened(self, factor: float) -> "Residuals":
        """The quantiles `factor` times as far from the median."""
        low, high = (self.p50 + factor * (end - self.p50) for end in (self.p10, self.p90))
        return self.model_copy(update={"p10": low, "p90": high})


FitT = TypeVar("FitT", bound=Spec)

_NOT_OF_THE_DEVICE = {"eager_floor_s", "eager_launch_s", "link_latency_s"}  # the host's, and a declared figure
_IN_KEY_TOKENS = {"block_tokens"}


def transferred(fit: FitT, source: DeviceFacts, target: DeviceFacts, time_ratio: float | None = None) -> FitT:
    """`fit`, made on `source`, for `target`, within plausible ranges. time_ratio: target seconds per source second;
    default: the ratio of the declared clocks"""
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
    """`value` clipped to the field's plausible range."""
    for constraint in type(fit).model_fields[name].metadata:
        low, high = getattr(constraint, "ge", None), getattr(constraint, "le", None)
        value = value if low is None else max(value, float(low))
        value = value if high is None else min(value, float(high))
    return value


Sizes = TypeVar("Sizes", bound=tuple[Any, ...])


def take(sizes: Sizes, rows: NDArray[Any] | slice) -> Sizes:
    """Rows by index array, mask or slice."""
    return _of_columns([sizes], lambda columns: columns[0][rows])


def joined(parts: Sequence[Sizes]) -> Sizes:
    """Concatenated rows of several tables; scalars are those of the first."""
    return _of_columns(parts, np.concatenate)


def _of_columns(parts: Sequence[Sizes], change: Callable[[Sequence[Any]], Any]) -> Sizes:
    """`change` of equal columns of all parts, however deep; scalars are those of the first part."""

    def of(values: Sequence[Any]) -> Any:
        if isinstance(values[0], np.ndarray):
            return change(values)
        return _of_columns(values, change) if hasattr(values[0], "_fields") else values[0]

    return type(parts[0])(*(of(values) for values in zip(*parts, strict=True)))


class KernelSeconds(NamedTuple):
    """A form's result: seconds in all, and by resource alone."""

    duration: Values
    compute: Values
    memory: Values


class Namespace(NamedTuple):
    """The functions of `numpy` with these names."""

    ceil: Callable[[Any], Any] = math.ceil
    floor: Callable[[Any], Any] = math.floor
    log2: Callable[[Any], Any] = math.log2
    maximum: Callable[[Any, Any], Any] = max
    minimum: Callable[[Any, Any], Any] = min

    @staticmethod
    def where(condition: Any, one: Any, other: Any) -> Any:
        """`one` if the condition holds, else `other`; evaluates both, like numpy."""
        return one if condition else other


SCALARS = Namespace()
