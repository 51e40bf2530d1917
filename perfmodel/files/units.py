"""Numbers in files: with units (`"2039 GB/s"`, `"80 GiB"`, `"1.5 ms"`) or plain, in the unit of the key.

Each dimension has generous limits, so that sums of quotients stay finite: a billion times a billion fits 64 bits,
twenty factors of 1e15 a double. Anything beyond is a typo or a wrong unit."""

import re
from collections.abc import Callable, Sequence
from math import inf
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{p}B": f for p, f in (_PREFIX | _BINARY).items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_PER_SECOND = {
    f"{what}{per}": factor
    for what in ("", "req", "requests", "request")
    for per, factor in {"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600}.items()
} | {"rps": 1.0, "qps": 1.0, "rpm": 1 / 60}
_COUNTS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# What `parse_count` takes, in the regular expressions of JSON Schema.
_COUNT_TEXT = r"^\s*\+?([0-9]+|[0-9]+([eE]\+?[0-9]+)?\s*[KMG]|([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*[kmg])\s*$"
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*")

# What each dimension accepts: unit as written -> factor to the base unit.
_UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()},
    "FLOP/s": {f"{p}{u}": f for p, f in _PREFIX.items() for u in ("FLOPS", "FLOP/s", "OPS", "OP/s")},
    "Hz": {f"{p}Hz": f for p, f in _PREFIX.items()},
    "s": _SECONDS,
    "ms": {unit: factor * 1e3 for unit, factor in _SECONDS.items()},
    "requests/s": _PER_SECOND,
}
# Units offered in errors, and the smallest (above 0) and largest amount.
_USUAL = {
    "bytes": "B, KB, MB, GB, TB, KiB, MiB, GiB",
    "bytes/s": "MB/s, GB/s, TB/s, GiB/s",
    "FLOP/s": "GFLOPS, TFLOPS, PFLOPS, TOPS",
    "Hz": "Hz, MHz, GHz",
    "s": "s, ms, us, ns, min, h",
    "ms": "ms, s, us, min",
    "requests/s": "req/s, req/min, req/h",
}
_RANGES = {"bytes": (1e-3, 1e18), "bytes/s": (1e-3, 1e18), "FLOP/s": (1e-3, 1e21), "Hz": (1e-3, 1e15)}
_RANGES |= {"s": (1e-12, 1e10), "ms": (1e-9, 1e13)}  # the clock's tick to three centuries
_LARGEST_COUNT = 10**9
_LARGEST = 1e15
_SMALLEST = 1e-12  # above 0


def parse_quantity(value: Any, dimension: str) -> Any:
    """`value` in the base unit of `dimension`; numbers and non-strings pass. ValueError names accepted units."""
    if isinstance(value, bool):
        raise ValueError(f"got {str(value).lower()}; expected a quantity in {dimension}")
    if not isinstance(value, str):
        return value
    units = _UNITS[dimension]
    match = _NUMBER.fullmatch(value)
    if match is None or (match[2] and match[2] not in units):
        raise ValueError(
            f"{value!r} is not a quantity in {dimension}; write a number, or a number with one of {_USUAL[dimension]}"
        )
    return float(match[1]) * (units[match[2]] if match[2] else 1.0)


def common_numbers(texts: Sequence[str]) -> tuple[tuple[float, ...], str] | None:
    """Quantities of one dimension in the last one's unit: `500 GB/s, 4 TB/s` are (0.5, 4) TB/s; `0.5x, 2x` have unit x.

    None for other texts."""
    matches = [_NUMBER.fullmatch(text) for text in texts]
    units = [match[2] for match in matches if match is not None]
    if len(units) < len(texts) or not units:
        return None
    numbers = [float(match[1]) for match in matches if match is not None]
    if len(set(units)) == 1 and units[0] in ("", "x"):
        return tuple(numbers), units[0]
    for known in _UNITS.values():
        if all(unit in known for unit in units):
            last = known[units[-1]]
            return tuple(number * known[unit] / last for number, unit in zip(numbers, units, strict=True)), units[-1]
    return None


def shortest_amount(amount: float, unit: str) -> str:
    """`amount` with the prefix of fewest digits (80 GB, 50 MiB, 0.6 us). unit: B, B/s, FLOPS, Hz or s."""
    prefixes = {p: f for p, f in _PREFIX.items() if p != "K"}
    if unit == "s":
        prefixes = {p: 10.0**exponent for p, exponent in (("", 0), ("m", -3), ("u", -6), ("n", -9))}
    elif unit.startswith("B"):
        prefixes |= _BINARY
    written = [f"{amount / factor:.12g} {prefix}{unit}" for prefix, factor in prefixes.items()]
    return min(written, key=lambda text: (len(text.split()[0].replace(".", "")), len(text)))


def _quantity(dimension: str) -> Any:
    """Annotated float with optional unit and limits of its dimension."""

    def within_range(written: Any) -> Any:
        amount = parse_quantity(written, dimension)
        if isinstance(amount, int | float) and -inf < amount < inf:  # others have their own sentence
            smallest, largest = _RANGES[dimension]
            if abs(amount) > largest or 0 < abs(amount) < smallest:
                shown = repr(written) if isinstance(written, str) else str(written)
                raise ValueError(f"got {shown[:60]}; expected {smallest:g} to {largest:g} {dimension}, or 0")
        return amount

    return BeforeValidator(within_range)


_SCHEMA = WithJsonSchema({"type": ["number", "string"]})
Bytes = Annotated[float, _quantity("bytes"), _SCHEMA]
BytesPerSecond = Annotated[float, _quantity("bytes/s"), _SCHEMA]
FlopsPerSecond = Annotated[float, _quantity("FLOP/s"), _SCHEMA]
Hertz = Annotated[float, _quantity("Hz"), _SCHEMA]
Seconds = Annotated[float, _quantity("s"), _SCHEMA]
Milliseconds = Annotated[float, _quantity("ms"), _SCHEMA]


def _not_vanishing(value: float) -> float:
    """`value`. Raises ValueError if too near 0 to divide by."""
    if 0 < value < _SMALLEST:
        raise ValueError(f"got {value:g}; expected a number of at least {_SMALLEST:g}")
    return value


def parse_count(value: Any) -> Any:
    """A count as in vLLM's flags: 8k is 8,000, 8K is 8,192, 1.5m is 1,500,000; other values pass. Raises ValueError for
    fractions, such as 1.5K. Source: vLLM 0.10, vllm/engine/arg_utils.py, human_readable_int."""
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _COUNTS:
        return value
    count = float(match[1]) * _COUNTS[match[2]]
    if count != round(count) or (match[2].isupper() and "." in match[1]):
        raise ValueError(f"got {value!r}; expected a whole number, as in 8k (8,000) or 8K (8,192)")
    return round(count)


class _CountSchema:
    """JSON Schema of a count: an integer within limits, or text with a suffix."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        text = {"type": "string", "pattern": _COUNT_TEXT, "examples": ["8k", "8K"]}
        return {"anyOf": [handler(core), text]}


_COUNT = BeforeValidator(parse_count)
PositiveInt = Annotated[int, _COUNT, Field(gt=0, le=_LARGEST_COUNT), _CountSchema()]
NonNegativeInt = Annotated[int, _COUNT, Field(ge=0, le=_LARGEST_COUNT), _CountSchema()]
PositiveFloat = Annotated[float, Field(gt=0, le=_LARGEST), AfterValidator(_not_vanishing)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=_LARGEST), AfterValidator(_not_vanishing)]
FittedSeconds = Annotated[float, Field(ge=0, le=1e3)]  # what a fit has found: next to nothing, too
# Of requests; its limits are those of plain numbers.
PerSecond = Annotated[
    PositiveFloat,
    BeforeValidator(lambda value: parse_quantity(value, "requests/s")),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}]}),
]
