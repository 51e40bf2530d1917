"""Axes of a sweep, parsed from `engine.max_num_seqs=16..256:5` or `=64,128,256`. Values are absolute or multiples of
the present one (`0.5x..2x`). Ranges are geometric; linear if they start at 0."""

import itertools
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from perfmodel.cost import step_costs
from perfmodel.cost.steps.explain import StepEstimate
from perfmodel.errors import SpecError
from perfmodel.files.units import parse_count
from perfmodel.planning.points import Point, batch_shape, load_point, step_of
from perfmodel.planning.typical_step import StepSpec, engine_of_step
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.overrides import hardware_path, list_position
from perfmodel.specs.scenario import Scenario

_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)")
_COUNT = re.compile(r"\d+(?:\.\d+)?\s?[kKmMgG](?![A-Za-z])")
_ONE_END = re.compile(r"\.\.[^/]*|[^/]*\.\.")
_RANGE = re.compile(r"(.+?)\.\.(.+?)(?::(\d+))?")
_NUM_VALUES = 5
_MAX_VALUES = 200
_LARGEST = 1e30  # in any unit
_MULTIPLE = "x"


@dataclass(frozen=True, slots=True)
class Axis:
    """A field path and its values as overrides write them.

    xs:       the values as numbers, in `unit`; empty for names
    unit:     "x" for multiples of `present`, else the unit in which the values are written
    present:  the scenario's own number at the path, if any"""

    path: str
    texts: tuple[str, ...]
    xs: tuple[float, ...] = ()
    unit: str = ""
    present: float | None = None
    is_whole: bool = False

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{self.path}={text}" for text in self.texts)

    @property
    def is_multiple(self) -> bool:
        return self.unit == _MULTIPLE

    def override(self, x: float) -> str:
        """The override that sets `x`, which need not be one of the axis's values."""
        return f"{self.path}={_written(x, self.unit, self.is_whole)}"

    def middle(self, low: float, high: float) -> float | None:
        """Geometric mean of two values; None between adjacent integers of an integer axis."""
        middle = (low * high) ** 0.5 if low > 0 else (low + high) / 2
        if not self.is_whole:
            return middle
        rounded = float(int(middle))
        rounded = rounded + 1 if rounded <= low else rounded
        return rounded if low < rounded < high else None

    def nearby(self, ratio: float) -> tuple[tuple[str, float], tuple[str, float]] | None:
        """((override, value / present) below, the same above), `ratio` from the present value; None without one."""
        if self.present is None and not self.is_multiple:
            return None
        if not self.is_whole:
            ends = [(f"{self.path}={_written(x, _MULTIPLE, False)}", x) for x in (1 / ratio, ratio)]
            return None if self.present == 0 else (ends[0], ends[1])
        assert self.present is not None  # an integer axis has a present value
        low = min(round(self.present / ratio), self.present - 1)
        high = max(round(self.present * ratio), self.present + 1)
        if low < 1:
            return None
        return (self.override(low), low / self.present), (self.override(high), high / self.present)


def axis_of(text: str, scenario: Scenario, step: StepSpec | None = None) -> Axis:
    """Parse `PATH=lo..hi`, `PATH=lo..hi:n` or `PATH=a,b,c` for a scenario and the step of interest. Raises SpecError
    for bad syntax; whether the path exists is checked when the scenario loads."""
    path, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not path or not values:
        raise SpecError(f"--vary {text}: write PATH=LOW..HIGH, PATH=LOW..HIGH:COUNT or PATH=A,B,C.")
    present = present_value(path, scenario, step)
    is_whole = isinstance(present, int)
    if is_whole:  # `8000..32000` of `8k..32k`
        try:
            values = _COUNT.sub(lambda match: str(parse_count(match[0])), values)
        except ValueError as error:
            raise SpecError(f"--vary {text}: {error}.") from None
    if _ONE_END.fullmatch(values):
        raise SpecError(f"--vary {text}: got {values}; expected both ends of a range, as in {path}=1..8 or =0.5x..2x.")
    if (match := _RANGE.fullmatch(values)) is not None:
        xs, unit = _spaced(text, match[1], match[2], int(match[3] or _NUM_VALUES))
    else:
        texts = tuple(part.strip() for part in values.split(","))
        if len(texts) > _MAX_VALUES:
            raise SpecError(f"--vary {text[:80]}...: got {len(texts):,} values; expected at most {_MAX_VALUES}.")
        numbers = [number for part in texts if (number := _NUMBER.fullmatch(part)) is not None]
        units = {number[2] for number in numbers}
        if len(numbers) < len(texts) or len(units) != 1:
            return Axis(path, texts, present=present)
        xs, unit = tuple(sorted(float(number[1]) for number in numbers)), units.pop()
        _refuse_beyond(text, *xs)
    if is_whole and unit == _MULTIPLE:
        assert present is not None
        xs, unit = tuple(x * present for x in xs), ""
    if is_whole:
        xs = tuple(dict.fromkeys(float(round(x)) for x in xs))
    return Axis(path, tuple(_written(x, unit, is_whole) for x in xs), xs, unit, present, is_whole)


def present_value(path: str, scenario: Scenario, step: StepSpec | None = None) -> int | float | None:
    """The scenario's number at an override's path; None without a single number there."""
    first, *rest = path.split(".")
    value: Any = scenario
    if first == "hardware":
        return _hardware_value(tuple(rest), scenario.hardware, path)
    if first == "step":
        first, value = ".".join(rest), step or StepSpec()
        rest = []
    if first == "cluster" and rest[:1] == ["pools"] and rest[2:3] == ["hardware"]:
        index = list_position([pool.model_dump(include={"role", "name"}) for pool in scenario.pools], rest[1])
        if index is None:
            return None  # reported when the scenario loads
        return _hardware_value(tuple(rest[3:]), scenario.pools[index].hardware or scenario.hardware, path)
    for part in (first, *rest):
        if isinstance(value, tuple):
            index = list_position([item.model_dump() for item in value], part)
            value = None if index is None else value[index]
        else:
            value = getattr(value, part, None)
    return _number(value)


def suspects(scenario: Scenario) -> list[str]:
    """Default axes of a what-if: every purchasable resource, and the load."""
    own = {
        f"cluster.pools.{number}.hardware": pool.hardware
        for number, pool in enumerate(scenario.pools)
        if pool.hardware is not None and scenario.cluster.pools
    }
    shared = len(own) < len(scenario.pools)
    devices = ({"hardware": scenario.hardware} if shared else {}) | own
    exchanges = scenario.cluster.is_disaggregated or any(pool.engine.num_devices > 1 for pool in scenario.pools)
    result = []
    for prefix, hardware in devices.items():
        level, link = hardware.declared.memory[0].level, hardware.scale_up_link
        names = ["peak_flops", f"{level}.bandwidth", f"{level}.capacity"]
        if link is not None and exchanges:
            names += [f"{link.name}.bandwidth"]
        result += [f"{prefix}.{name}" for name in names]
    if scenario.num_nodes > 1:
        result.append("cluster.network.bandwidth_bytes_per_s")
    if scenario.cluster.is_disaggregated and scenario.cluster.kv_transfer.bandwidth_bytes_per_s is not None:
        result.append("cluster.kv_transfer.bandwidth_bytes_per_s")
    result += ["overheads.kernels", "overheads.host"]
    arrivals = scenario.traffic.arrivals
    if arrivals.rate is not None and not scenario.traffic.trace:
        result.append("traffic.arrivals.rate")
    elif arrivals.concurrency is not None and arrivals.concurrency > 1:
        result.append("traffic.arrivals.concurrency")
    varied = [f"{path}=0.5x..2x:3" for path in result]
    return [*varied, "traffic.arrivals.concurrency=1,2,4"] if arrivals.concurrency == 1 else varied  # no half of one


def _spaced(text: str, low_text: str, high_text: str, count: int) -> tuple[tuple[float, ...], str]:
    low, high = _NUMBER.fullmatch(low_text.strip()), _NUMBER.fullmatch(high_text.strip())
    if low is None or high is None:
        raise SpecError(f"--vary {text}: got {low_text}..{high_text}, both ends must be numbers (2, 0.5x, 900 GB/s).")
    if (low[2] or high[2]) != high[2] or (low[2] == _MULTIPLE) != (high[2] == _MULTIPLE):
        raise SpecError(f"--vary {text}: got {low[2]!r} and {high[2]!r}; give both ends in the same unit.")
    start, end = float(low[1]), float(high[1])
    _refuse_beyond(text, start, end)
    if not start < end or not 2 <= count <= _MAX_VALUES:
        raise SpecError(
            f"--vary {text}: got {count} values from {start:g} to {end:g}; expected 2 to {_MAX_VALUES}, upwards."
        )
    xs = np.geomspace(start, end, count) if start > 0 else np.linspace(start, end, count)
    return tuple(float(f"{x:.6g}") for x in xs), high[2]


def _refuse_beyond(text: str, *xs: float) -> None:
    beyond = next((x for x in xs if abs(x) > _LARGEST), None)
    if beyond is not None:
        raise SpecError(f"--vary {text[:80]}: got {beyond:g}; expected numbers up to {_LARGEST:g}.")


def _written(x: float, unit: str, is_whole: bool) -> str:
    if is_whole and not unit:
        return str(round(x))
    return f"{x:.12f}".rstrip("0").rstrip(".") + _MULTIPLE if unit == _MULTIPLE else f"{x:.12g} {unit}".strip()


def _hardware_value(path: tuple[str, ...], hardware: HardwareSpec, text: str) -> int | float | None:
    if path in ((), ("peak_flops",)):
        return None  # a device as a whole; one for each number format
    value: Any = hardware.model_dump(mode="json")
    for key in hardware_path(path, value, text):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return _number(value)


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


_EXACT = 1e-6  # of bounds: the cost model has no noise


@dataclass(frozen=True, slots=True)
class BoundChange:
    """A change of bound along an axis: from `at` on, `what` is bound by `after` instead of `before`. what: an operator,
    or "step": the bound with the largest share of the step's time"""

    path: str
    what: str
    before: str
    after: str
    at: float
    unit: str = ""


def bound_changes(base: Point, axis: Axis, with_operators: bool = False) -> list[BoundChange]:
    """Changes of bound along a numeric axis, of the step or (`with_operators`) of each operator. Found by bisection on
    the noise-free cost model. Errors of loading or timing a value propagate."""
    scenario, own_step = load_point(base)
    engine = engine_of_step(scenario, is_prompt=own_step is not None and not own_step.batch)
    costs = step_costs(engine) if axis.path.startswith("step.") else None  # one set, along a step's own fields

    @lru_cache(maxsize=4096)
    def estimate(x: float) -> StepEstimate:
        point = replace(base, overrides=(*base.overrides, axis.override(x)))
        taker, step = (engine, step_of(point)) if costs is not None else load_point(point)
        assert step is not None  # bounds are asked for of points with a step
        taker = taker if costs is not None else engine_of_step(taker, is_prompt=not step.batch)
        return (costs or step_costs(taker)).estimate(batch_shape(step, taker))

    def bound(what: str, x: float) -> str:
        result = estimate(x)
        return result.bound if what == "step" else next((row.bound for row in result.rows if row.name == what), "")

    ends, changes = sorted(axis.xs), []
    names = [row.name for row in estimate(ends[0]).rows] if with_operators and len(ends) > 1 else []
    for what in dict.fromkeys(["step", *names]):
        for low, high in itertools.pairwise(ends):
            start = low
            while bound(what, start) != bound(what, high):
                below, above = start, high
                while above - below > _EXACT * abs(below) and (middle := axis.middle(below, above)) is not None:
                    is_below = bound(what, middle) == bound(what, start)
                    below, above = (middle, above) if is_below else (below, middle)
                before, after = bound(what, start), bound(what, above)
                changes.append(BoundChange(axis.path, what, before, after, above, axis.unit))
                start = above
    return changes
