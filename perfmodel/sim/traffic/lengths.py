"""Length distributions: endless token counts, drawn in chunks.

Distributions without an upper end (lognormal, exponential) are clipped to what the engine can take; counts that the
user wrote down are not, so that a prompt too long is an error and not a surprise.
"""

__all__ = ["draw_lengths", "lognormal_parameters"]

from collections.abc import Iterator
from math import log, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.files.bounded import LARGEST_TABLE_BYTES, read_bounded_text
from perfmodel.specs.traffic import Lengths

_CHUNK = 4096
_Z99 = 2.3263478740408408  # 99th percentile of the standard normal distribution


def lognormal_parameters(mean: float, p99: float | None, std: float | None) -> tuple[float, float]:
    """(mu, sigma) of the logarithm.

    exp(mu + sigma^2 / 2) = mean, and exp(mu + z99 sigma) = p99: sigma^2/2 - z99 sigma + ln(p99 / mean) = 0, the smaller
    root; or sigma^2 = ln(1 + std^2 / mean^2). Raises SpecError for a p99 that no lognormal with that mean has.
    """
    if std is not None:
        sigma = sqrt(log(1 + (std / mean) ** 2))
    else:
        assert p99 is not None
        inside = _Z99**2 - 2 * log(p99 / mean)
        if p99 <= mean or inside < 0:
            most = mean * np.exp(_Z99**2 / 2)
            raise SpecError(f"no lognormal of mean {mean:g} has p99 {p99:g}; it lies above the mean, up to {most:.4g}")
        sigma = _Z99 - sqrt(inside)
    return log(mean) - sigma**2 / 2, sigma


def draw_lengths(lengths: Lengths, rng: np.random.Generator, engine_limit: int) -> Iterator[int]:
    """Token counts from `lengths`, at least `lengths.min`, at most `lengths.max`."""
    values = _empirical_values(lengths) if lengths.distribution == "empirical" else None
    is_unbounded = lengths.distribution in ("lognormal", "exponential")
    limit = engine_limit if is_unbounded else 2**31
    highest = min(lengths.max or limit, limit)
    while True:
        drawn = np.rint(_chunk(lengths, values, rng))
        yield from np.clip(drawn, lengths.min, highest).astype(np.int64).tolist()


def _chunk(lengths: Lengths, values: NDArray[np.int64] | None, rng: np.random.Generator) -> NDArray[np.float64]:
    match lengths.distribution:
        case "fixed":
            return np.full(_CHUNK, float(lengths.value or 1))
        case "uniform":
            return rng.integers(lengths.low or 1, (lengths.high or 1) + 1, _CHUNK).astype(np.float64)
        case "lognormal":
            mu, sigma = lognormal_parameters(lengths.mean or 1.0, lengths.p99, lengths.std)
            return rng.lognormal(mu, sigma, _CHUNK)
        case "exponential":
            return rng.exponential(lengths.mean or 1.0, _CHUNK)
    assert values is not None
    return rng.choice(values, _CHUNK).astype(np.float64)


def _empirical_values(lengths: Lengths) -> NDArray[np.int64]:
    if lengths.values is not None:
        return np.array(lengths.values)
    assert lengths.path is not None
    path = Path(lengths.path)
    try:
        lines = read_bounded_text(path, LARGEST_TABLE_BYTES).splitlines()
    except OSError as error:
        raise WorkloadError(
            f"{path}: cannot be read ({error.strerror}); give a file with one token count per line"
        ) from None
    values = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not line.strip().isdigit() or int(line) < 1:
                raise WorkloadError(f"{path}:{number}: found {line.strip()!r}, expected a positive token count")
            values.append(int(line))
    if not values:
        raise WorkloadError(f"{path}: has no token counts; write one per line")
    return np.array(values)
