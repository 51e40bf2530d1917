"""Random traffic: endless, chunked arrival times, token counts and shared prefixes.

`poisson_fixed_count` is the "constant rate" of load generators: exponential gaps, rescaled so that each stage has
exactly rate x duration requests (a Poisson process conditioned on its count).

Unbounded length distributions (lognormal, exponential) are clipped to the engine's limit; explicit counts are not, so
that a prompt too long is an error. Other draws are SplitMix64 hashes (Steele, Lea and Flood 2014) of what they are for:
no state, and independent of batch mates and event order."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from math import erfc, exp, inf, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.files.sandbox import LARGEST_TABLE_BYTES, read_limited_text
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Lengths, Prefix

_CHUNK = 4096
_Z99 = 2.3263478740408408  # 99th percentile of the standard normal
_GROUP = 1 << 32  # content numbers of one group's prefix
_PROMPT = 1 << 62  # offset of the content numbers of whole prompts


def arrival_times(arrivals: Arrivals, duration_s: float | None, rng: np.random.Generator) -> Iterator[float | None]:
    """Arrival times in seconds, drawn from `rng`; endless None for a closed loop."""
    if arrivals.process == "closed_loop":
        return repeat(None)
    if arrivals.process in ("burst", "trace"):
        return repeat(0.0)
    stages = [(stage.rate, stage.duration_s) for stage in arrivals.stages]
    if not stages:
        assert arrivals.rate is not None  # its validator saw to that
        stages = [(arrivals.rate, inf if duration_s is None else duration_s)]
    return _staged(arrivals, stages, rng)


def _endless(arrivals: Arrivals, rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Times with mean gap 1 / rate, drawn in chunks."""
    start = 0.0
    while True:
        if arrivals.process == "constant":
            gaps = np.full(_CHUNK, 1 / rate)
        elif arrivals.process == "gamma":
            shape = 1 / arrivals.cv**2
            gaps = rng.gamma(shape, 1 / (rate * shape), _CHUNK)
        else:
            gaps = rng.exponential(1 / rate, _CHUNK)
        times = start + np.cumsum(gaps)
        yield from times.tolist()
        start = float(times[-1])


def _staged(arrivals: Arrivals, stages: list[tuple[float, float]], rng: np.random.Generator) -> Iterator[float]:
    """Times of consecutive `stages` (rate, seconds)."""
    start = 0.0
    for rate, duration_s in stages:
        if arrivals.process == "poisson_fixed_count" and duration_s < inf:
            gaps = rng.exponential(1.0, round(rate * duration_s))  # the last arrival falls on the end, up to rounding
            yield from (start + np.cumsum(gaps) * (duration_s / gaps.sum())).tolist() if len(gaps) else ()
        else:
            for time in _endless(arrivals, rate, rng):
                if time > duration_s:
                    break
                yield start + time
        start += duration_s


def lognormal_parameters(mean: float, p99: float | None, std: float | None) -> tuple[float, float]:
    """(mu, sigma) of the logarithm.

    exp(mu + sigma^2 / 2) = mean, and exp(mu + z99 sigma) = p99: sigma^2/2 - z99 sigma + ln(p99 / mean) = 0, the smaller
    root; or sigma^2 = ln(1 + std^2 / mean^2). Raises SpecError for a p99 that no lognormal with that mean has."""
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


def is_unbounded(lengths: Lengths) -> bool:
    """Whether only the engine's limit bounds the distribution."""
    return lengths.distribution in ("lognormal", "exponential")


def share_above(lengths: Lengths, limit: int) -> float:
    """Share of an unbounded distribution above `limit` tokens; 0 for others.

    lognormal: erfc((ln limit - mu) / (sigma sqrt 2)) / 2; exponential: exp(-limit / mean)"""
    if not is_unbounded(lengths) or (lengths.max is not None and lengths.max <= limit):
        return 0.0
    assert lengths.mean is not None  # its validator saw to that
    if lengths.distribution == "exponential":
        return exp(-limit / lengths.mean)
    mu, sigma = lognormal_parameters(lengths.mean, lengths.p99, lengths.std)
    return erfc((log(limit) - mu) / (sigma * sqrt(2))) / 2


def draw_lengths(lengths: Lengths, rng: np.random.Generator, engine_limit: int) -> Iterator[int]:
    """Token counts from `lengths` within `lengths.min`, `lengths.max` and `engine_limit`."""
    values = _empirical_values(lengths) if lengths.distribution == "empirical" else np.empty(0)
    limit = engine_limit if is_unbounded(lengths) else 2**31
    highest = min(lengths.max or limit, limit)
    while True:
        drawn: NDArray[Any]
        match lengths.distribution:
            case "fixed":
                drawn = np.full(_CHUNK, float(lengths.value or 1))
            case "uniform":
                drawn = rng.integers(lengths.low or 1, (lengths.high or 1) + 1, _CHUNK)
            case "lognormal":
                mu, sigma = lognormal_parameters(lengths.mean or 1.0, lengths.p99, lengths.std)
                drawn = rng.lognormal(mu, sigma, _CHUNK)
            case "exponential":
                drawn = rng.exponential(lengths.mean or 1.0, _CHUNK)
            case _:
                drawn = rng.choice(values, _CHUNK)
        yield from np.clip(np.rint(drawn.astype(np.float64)), lengths.min, highest).astype(np.int64).tolist()


def _empirical_values(lengths: Lengths) -> NDArray[np.int64]:
    if lengths.values is not None:
        return np.array(lengths.values)
    assert lengths.path is not None
    path = Path(lengths.path)
    try:
        lines = read_limited_text(path, LARGEST_TABLE_BYTES).splitlines()
    except OSError as error:
        problem = f"{path}: cannot be read ({error.strerror}); give a file with one token count per line"
        raise WorkloadError(problem) from None
    values = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not line.strip().isdigit() or int(line) < 1:
                raise WorkloadError(f"{path}:{number}: got {line.strip()!r}; expected a positive token count")
            values.append(int(line))
    if not values:
        raise WorkloadError(f"{path}: has no token counts; write one per line")
    return np.array(values)


def prefix_plan(
    prefix: Prefix | None, lengths: Iterator[int], rng: np.random.Generator, block_size: int, longest: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(prompt tokens, contents of its leading full blocks) per request; the length includes the shared prefix.

    lengths: prompt tokens; rng: draws the group; block_size: tokens of a block
    longest: longest served prompt in tokens; longer ones are refused, so further blocks need no content"""
    if prefix is None:
        yield from ((length, ()) for length in lengths)
        return

    def shared(group: int, length: int) -> tuple[int, ...]:
        num_blocks = min(prefix.shared_tokens, length, longest) // block_size
        return tuple(range(group * _GROUP, group * _GROUP + num_blocks))

    if prefix.num_prompts_per_group is None:
        for length in lengths:
            yield length, shared(int(rng.integers(prefix.num_groups)), length)
        return
    # A random permutation of the distinct prompts, repeated.
    prompts: list[tuple[int, tuple[int, ...]]] = []
    for number in range(prefix.num_groups * prefix.num_prompts_per_group):
        length = next(lengths)
        beginning, first = shared(number // prefix.num_prompts_per_group, length), _PROMPT + number * _GROUP
        own = range(first, first + min(length, longest) // block_size - len(beginning))
        prompts.append((length, (*beginning, *own)))
    order = rng.permutation(len(prompts))
    while True:
        for number in order:
            yield prompts[number]


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WHOLE = 1 << 64


def hashed(seed: int, number: int) -> int:
    """64-bit hash of (`seed`, `number`): SplitMix64's output function, applied twice."""
    return _mixed(_mixed(seed & _MASK) + number)


def _mixed(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def hashes(start: int, count: int) -> NDArray[np.uint64]:
    """SplitMix64 outputs of `count` consecutive states from `start` on."""
    state = np.uint64(start & _MASK) + np.uint64(_GOLDEN) * np.arange(count, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX[1])
    return state ^ (state >> np.uint64(31))


def uniform_draws(seed: int, request_id: int, count: int) -> NDArray[np.float64]:
    """`count` uniform draws from [0, 1) for this request under `seed`."""
    drawn = hashes(hashed(seed, request_id) + _GOLDEN, count) >> np.uint64(11)
    return drawn.astype(np.float64) * 2.0**-53


class Shares:
    """Assigns requests to kinds 0, 1, ... with probabilities `shares`; the rest are of kind len(shares).

    purpose: makes assignments for different purposes independent"""

    def __init__(self, shares: Sequence[float], seed: int, purpose: str) -> None:
        self._ends = [min(round(end * _WHOLE), _WHOLE - 1) for end in accumulate(shares)]
        if shares and abs(sum(shares) - 1) < 1e-9:
            self._ends[-1] = _WHOLE - 1
        self._seed = hashed(seed, int.from_bytes(purpose.encode()[:8]))

    def of(self, number: int) -> int:
        """Kind of request `number`."""
        point = hashed(self._seed, number)
        return bisect_left(self._ends, point)

    def of_all(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Kinds of requests `numbers`."""
        return np.array([self.of(number) for number in numbers.tolist()], dtype=np.int64)


def class_shares(scenario: Scenario) -> Shares:
    """Assignment of requests to `traffic.classes`."""
    return Shares([kind.share for kind in scenario.traffic.classes], scenario.seed, "classes")
