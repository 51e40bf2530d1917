"""Units in which figures are published, and what they are in the unit of the metric."""

__all__ = ["factor_of_unit"]

import re
from collections.abc import Mapping

from perfmodel.errors import did_you_mean

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_BYTES = {f"{p}b": f for p, f in _PREFIXES.items()} | {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_FLOPS = {f"{p}{u}": f for p, f in _PREFIXES.items() for u in ("flop/s", "flops", "op/s", "ops")}
_TOKENS = {f"{p}{u}/s": f for p, f in (("", 1.0), ("k", 1e3)) for u in ("tok", "token", "tokens")}
_TOKENS |= {f"{unit}/{per}": f for unit, f in _TOKENS.items() for per in ("gpu", "user")}
_REQUESTS = {"req/s": 1.0, "request/s": 1.0, "requests/s": 1.0, "qps": 1.0, "rps": 1.0, "req/min": 1 / 60}

# dimension -> unit, in lower case and without spaces -> factor to the unit of the metrics of that dimension
_UNITS: Mapping[str, Mapping[str, float]] = {
    "s": _SECONDS,
    "ms": {unit: factor * 1e3 for unit, factor in _SECONDS.items()},
    "us": {unit: factor * 1e6 for unit, factor in _SECONDS.items()},
    "tokens/s": _TOKENS,
    "requests/s": _REQUESTS,
    "TFLOP/s": {unit: factor / 1e12 for unit, factor in _FLOPS.items()},
    "GB/s": {f"{unit}/s": factor / 1e9 for unit, factor in _BYTES.items()},
    "GB": {unit: factor / 1e9 for unit, factor in _BYTES.items()},
    "bytes": {**_BYTES, "bytes": 1.0, "bytes/token": 1.0, "kb/token": 1e3, "mb/token": 1e6},
    "fraction": {"": 1.0, "fraction": 1.0, "%": 0.01, "percent": 0.01},
    "times": {"": 1.0, "x": 1.0, "times": 1.0, "fraction": 1.0, "%": 0.01},
    "count": dict.fromkeys(("", "req", "requests", "sequences", "tokens", "blocks", "preemptions"), 1.0),
    "USD": {"usd": 1.0, "$": 1.0, "": 1.0},
    "J": {"j": 1.0, "kj": 1e3, "wh": 3600.0},
}
# What an error message offers.
_USUAL = {
    "s": "s, ms, us, min",
    "ms": "ms, s, us",
    "us": "us, ms, s",
    "tokens/s": "tok/s, ktok/s, tok/s/GPU",
    "requests/s": "req/s, req/min",
    "TFLOP/s": "TFLOP/s, GFLOP/s, PFLOP/s",
    "GB/s": "GB/s, TB/s, GiB/s",
    "GB": "GB, MB, GiB",
    "bytes": "B, KB, KiB, MB",
    "fraction": "fraction, %",
    "times": "x, %",
    "count": "req, requests, sequences, blocks, or none",
    "USD": "USD",
    "J": "J, kJ, Wh",
}
_REMARK = re.compile(r"\(.*\)")


def factor_of_unit(unit: str, dimension: str, metric: str) -> float:
    """What one `unit` is in `dimension`. Case, spaces and remarks in brackets do not count.

    Raises ValueError that names the units of the metric.
    """
    known = _UNITS[dimension]
    plain = "".join(_REMARK.sub("", unit).split()).lower()
    if plain in known:
        return known[plain]
    near = did_you_mean(plain, known)
    raise ValueError(f"unit: found {unit!r}, {metric} is given in {_USUAL[dimension]}{near and '.' + near}")
