"""Expert routing: expected load of one rank under uniform and skewed routing.

Grouped GEMM time depends on distinct experts (weights read), assignments (rows multiplied) and tiles (each expert pads
its rows to whole tiles). Uniform models a well-trained router; power laws stand for skewed domain traffic.

With a fixed capacity every expert has a buffer of equal size, whatever the router says:

    C = ceil(c n k / E) rows for each expert, of n tokens that choose k of E experts under capacity factor c

Experts with fewer rows pad, those with more drop the rest. No rank waits for a popular expert and shapes are static, at
the price of padding and of dropped tokens (quality).

Source: Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch Transformer), section 2.2.

Load balancers replicate experts and place them for equal load. Replicas go one at a time to the expert with the highest
load per copy; then copies, highest load first, to the least loaded rank with a free slot. Placement knows long-run
popularity, not the noise of a step. Where the groups of a router divide by the nodes, groups are packed on nodes first,
the same way, and each node copies and places its own. Source: DeepSeek-AI 2025, "Expert Parallelism Load Balancer"
(EPLB; vLLM: enable_eplb), global and hierarchical policy.

An expert is among a token's k with a probability of its own, drawn from a beta distribution of mean p = k / E:

    variance = phi p^2,   a = p s,   b = (1 - p) s,   s = (1 - p) / (phi p) - 1

phi is the dispersion: 0 is uniform routing, 1 spreads popularity as an exponential distribution does. The tokens X of
an expert among n are then beta-binomial, and in closed form

    P(X = 0) = B(a, b + n) / B(a, b)        so that fewer distinct experts are read than under uniform routing
    P(X = i + 1) / P(X = i) = (n - i) (a + i) / ((i + 1) (b + n - i - 1))

A token still has exactly k experts.

Layers wait for the rank with most assignments. Relative to the mean A = n k / R, with E / R experts a rank, loads have

    variance v = s + q, third moment 2 q^2 + 3 q s + s^2      s = (1 - k / E) / A of tokens, q = phi R / E of popularity
    largest of R: 1 + m1 sqrt(v) + (m2 - 1) third / (6 v)     m1, m2: mean, mean square of that of R standard normals

as a gamma mixture of Poisson counts. That loads add up to 1 moves the largest no nearer to the mean. A load balancer
leaves what its placement cannot even out, s, and by how much popularity has changed since: `_DRIFT` of phi per slot.

Source: Skellam 1948 (beta-binomial); Cornish and Fisher 1938 (quantiles by skewness). Phi is fitted to servers
(`perfmodel calibrate --routing`): routers balanced over a corpus are not so over the tokens of a batch."""

from collections.abc import Callable
from functools import lru_cache, partial
from math import ceil, exp, lgamma, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.models.architecture import MoEFFN
from perfmodel.specs.traffic import ExpertRouting

Values = NDArray[np.float64]

TILE_ROWS = (16, 32, 64, 128, 256)  # rows of the tiles that grouped GEMM kernels use
_TILES = np.array(TILE_ROWS, dtype=np.float64)
_EXACT_BELOW = 64.0  # rows per expert up to which the binomial is summed; above, a normal's quantiles stand for it
_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 64) for i in range(64)])
_DEVIATIONS = np.linspace(-8.0, 8.0, 1025)
_BELOW = np.array([NormalDist().cdf(x) for x in _DEVIATIONS])
_SEED = 0  # of what is drawn of popularity
_MAX_POPULAR = 200.0  # how much more often than the least the most popular expert may be drawn [assumed]
# Share of phi that EPLB does not know. TensorRT-LLM tech blog 4, table 1 (DeepSeek-R1, A = 1,024): loads of 32 ranks of
# 9 slots vary by 52.0, of 36 of 8 by 53.9; beside s, both leave 0.0099 per slot. Experts vary by 164.1 of 128.
_DRIFT = 0.0099 / 1.64


class Placement(NamedTuple):
    """Slot s of rank r holds a copy of expert `expert[r, s]` (-1: none), the `copy[r, s]`-th of `copies[expert]`."""

    expert: NDArray[np.int64]
    copy: NDArray[np.int64]
    copies: NDArray[np.int64]

    def rows(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """(ranks, slots): tokens per slot; copies share the `counts` of their expert."""
        shared = (counts[self.expert] + self.copy) // self.copies[self.expert]
        return np.where(self.expert < 0, 0, shared)


def consecutive_experts(num_experts: int, num_ranks: int) -> Placement:
    """Consecutive experts on each of `num_ranks` ranks, one copy each."""
    slots = ceil(num_experts / num_ranks)
    padded = np.full(num_ranks * slots, -1, dtype=np.int64)
    padded[:num_experts] = np.arange(num_experts)
    expert = padded.reshape(num_ranks, slots)
    return Placement(expert, np.zeros_like(expert), np.ones(num_experts, dtype=np.int64))


def balanced_packs(weights: Values, num_packs: int) -> NDArray[np.int64]:
    """The pack of each item, at most ceil(n / packs) in one: heaviest first, each to the lightest pack with room."""
    room, load = np.full(num_packs, ceil(len(weights) / num_packs)), np.zeros(num_packs)
    packs = np.zeros(len(weights), dtype=np.int64)
    for item in np.argsort(-weights, kind="stable"):
        pack = packs[item] = np.where(room > 0, load, np.inf).argmin()
        room[pack] -= 1
        load[pack] += weights[item]
    return packs


def place_experts(
    popularity: Values, num_ranks: int, num_redundant: int = 0, num_groups: int = 1, num_nodes: int = 1
) -> Placement:
    """Place experts of given `popularity` (any unit) and `num_redundant` copies on `num_ranks` ranks.

    num_groups: of consecutive experts, which stay together on one of `num_nodes` nodes where both divide evenly"""
    num_experts = len(popularity)
    if num_nodes > 1 and not (num_groups % num_nodes or num_ranks % num_nodes or num_redundant % num_nodes):
        return _placed_by_node(popularity, num_ranks, num_redundant, num_groups, num_nodes)
    copies = np.ones(num_experts, dtype=np.int64)
    owners, numbers = list(range(num_experts)), [0] * num_experts  # each expert once, then copies as they come
    for _ in range(num_redundant):
        owner = int((popularity / copies).argmax())
        owners.append(owner)
        numbers.append(int(copies[owner]))
        copies[owner] += 1
    ranks = balanced_packs((popularity / copies)[owners], num_ranks)
    expert = np.full((num_ranks, ceil(len(owners) / num_ranks)), -1, dtype=np.int64)
    copy = np.zeros_like(expert)
    for rank in range(num_ranks):
        items = np.flatnonzero(ranks == rank)
        expert[rank, : len(items)], copy[rank, : len(items)] = np.take(owners, items), np.take(numbers, items)
    return Placement(expert, copy, copies)


def _placed_by_node(
    popularity: Values, num_ranks: int, num_redundant: int, num_groups: int, num_nodes: int
) -> Placement:
    groups = np.arange(len(popularity)).reshape(num_groups, -1)
    nodes = balanced_packs(popularity[groups].sum(axis=1), num_nodes)
    copies = np.zeros(len(popularity), dtype=np.int64)
    parts = []
    for node in range(num_nodes):
        experts = groups[nodes == node].ravel()
        part = place_experts(popularity[experts], num_ranks // num_nodes, num_redundant // num_nodes)
        copies[experts] = part.copies
        parts.append((np.where(part.expert < 0, -1, experts[part.expert]), part.copy))
    expert, copy = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Placement(expert, copy, copies)


class ExpertLoad(NamedTuple):
    """The load of one rank.

    distinct: experts with tokens; assignments: (token, expert) pairs
    tiles:    sum over experts of ceil(rows / t), for each t in TILE_ROWS; empty if not known"""

    distinct: float
    assignments: float
    tiles: tuple[float, ...] = ()


# (block, tokens of all data-parallel ranks, ranks that share out the experts) -> load of the rank that sets the time
Routing = Callable[[MoEFFN, int, int], ExpertLoad]


def distinct_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Expected experts that get at least one of `num_tokens` tokens: D = E (1 - (1 - k/E)^n).

    Tokens pick k of E distinct experts uniformly and independently. Group-limited routing (DeepSeek-V3: the best 4 of 8
    groups first) leaves k/E, and so D, unchanged. Source: linearity of expectation."""
    missed: float = (1.0 - min(1.0, top_k / num_experts)) ** num_tokens
    return num_experts * (1.0 - missed)


def expected_tiles(num_tokens: float, probability: float) -> Values:
    """E ceil(X / t) for each t in TILE_ROWS, with X ~ Binomial(n, p) the rows of one expert.

    E ceil(X / t) = sum over j >= 0 of P(X > j t). Source: tail sum."""
    mean = num_tokens * probability
    if probability >= 1.0:
        return np.ceil(num_tokens / _TILES)
    if mean <= 0.0:
        return np.zeros(len(TILE_ROWS))
    if mean > _EXACT_BELOW:
        rows = np.maximum(mean + sqrt(mean * (1.0 - probability)) * _QUANTILES, 0.0)
        tiles: Values = np.ceil(rows[:, None] / _TILES).mean(axis=0)
        return tiles
    most = int(min(num_tokens, mean + 8.0 * sqrt(mean) + 8.0))
    i = np.arange(most)
    # In logarithms: of an expert that all but one in 10^16 tokens choose, P(X = 0) is no number.
    steps = np.log((num_tokens - i) / (i + 1.0)) + (np.log(probability) - np.log1p(-probability))
    mass = np.exp(num_tokens * np.log1p(-probability) + np.cumsum(np.append(0.0, steps)))
    above = np.maximum(1.0 - np.cumsum(mass), 0.0)  # P(X > i)
    return np.array([above[::t].sum() for t in TILE_ROWS])


def uniform_routing(ffn: MoEFFN, num_tokens: int, num_ranks: int) -> ExpertLoad:
    """Expected load of any rank with ceil(E / ranks) experts: its share of D, and n k E_local / E assignments."""
    local, top_k = ceil(ffn.num_experts / num_ranks), min(ffn.top_k, ffn.num_experts)
    return _uniform(local, num_tokens, top_k / ffn.num_experts)


@lru_cache(maxsize=256)
def _largest_of(count: int) -> tuple[float, float]:
    """Mean and mean square of the largest of `count` standard normals, over quantiles of equal weight."""
    largest = np.array([NormalDist().inv_cdf(((i + 0.5) / 512) ** (1.0 / count)) for i in range(512)])
    return float(largest.mean()), float((largest**2).mean())


def largest_load(num_ranks: int, noise: float, dispersion: float) -> float:
    """The expected largest load over the mean. noise, dispersion: s and q"""
    variance, (mean, square) = noise + dispersion, _largest_of(num_ranks)
    third = 2.0 * dispersion**2 + 3.0 * dispersion * noise + noise**2
    return 1.0 + mean * sqrt(variance) + (square - 1.0) * third / (6.0 * variance) if num_ranks > 1 else 1.0


def slowest_uniform_routing(ffn: MoEFFN, num_tokens: int, num_ranks: int) -> ExpertLoad:
    """Expected load of the most loaded rank under uniform routing; its experts are that much more popular."""
    local, top_k = ceil(ffn.num_experts / num_ranks), min(ffn.top_k, ffn.num_experts)
    if num_ranks <= 1 or not num_tokens:
        return _uniform(local, num_tokens, top_k / ffn.num_experts)
    total, rows = num_tokens * top_k, num_tokens * top_k * local / ffn.num_experts
    noise = (1.0 - top_k / ffn.num_experts) / rows
    most = min(rows * largest_load(num_ranks, noise, 0.0) if noise else rows, total, num_tokens * local)
    return _uniform(local, num_tokens, most / (num_tokens * local))


def _uniform(num_experts: int, num_tokens: int, probability: float) -> ExpertLoad:
    tiles = num_experts * expected_tiles(num_tokens, probability)
    distinct = num_experts * (1.0 - (1.0 - probability) ** num_tokens)
    return ExpertLoad(distinct, num_experts * num_tokens * probability, tuple(tiles.tolist()))


Chances = Callable[[int, int], Values]  # (experts, top_k) -> (draws, experts): how likely each is among a token's k


def popularity_of(spec: ExpertRouting, *, num_draws: int = 8) -> Chances:
    """Each expert's chance to be among a token's k, as the scenario says; random ones are drawn `num_draws` times.

    Popularity has the density x^-alpha, or is in proportion to recorded counts per expert, of which blocks with another
    number of experts use the quantiles; the most popular first."""

    @lru_cache(maxsize=256)
    def chances(num_experts: int, top_k: int) -> Values:
        if spec.alpha is not None:
            draws = np.random.default_rng((_SEED, num_experts, top_k)).random((num_draws, num_experts))
            return _inclusion(_power_law(draws, spec.alpha), top_k)
        if spec.popularity is None:
            return np.full((1, num_experts), min(1.0, top_k / num_experts))
        recorded = np.sort(np.asarray(spec.popularity, dtype=np.float64))[::-1]
        places = (np.arange(num_experts) + 0.5) / num_experts * len(recorded) - 0.5
        counts = np.interp(places, np.arange(len(recorded)), recorded)
        draws = np.random.default_rng((_SEED, num_experts)).permuted(np.tile(counts, (num_draws, 1)), axis=1)
        return _inclusion(draws, top_k)

    return chances


def skewed_routing(
    spec: ExpertRouting, num_redundant: int | None = None, *, num_draws: int = 8, ranks_per_node: int | None = None
) -> Routing:
    """Load of the slowest rank under the popularity that `spec` gives, mean over `num_draws`, once per block shape.

    num_redundant: copies of popular experts, placed by `place_experts`; None: consecutive experts; ranks_per_node: all
    ranks unless given"""
    chances_of = popularity_of(spec, num_draws=num_draws)

    @lru_cache(maxsize=256)
    def placements(num_experts: int, top_k: int, num_ranks: int, num_groups: int) -> list[Placement]:
        chances, num_nodes = chances_of(num_experts, top_k), ceil(num_ranks / (ranks_per_node or num_ranks))
        if num_redundant is None:
            return [consecutive_experts(num_experts, num_ranks)] * len(chances)
        return [place_experts(draw, num_ranks, num_redundant, num_groups, num_nodes) for draw in chances]

    def route(ffn: MoEFFN, num_tokens: int, num_ranks: int) -> ExpertLoad:
        top_k = min(ffn.top_k, ffn.num_experts)
        counts = np.random.default_rng((_SEED, num_tokens)).binomial(num_tokens, chances_of(ffn.num_experts, top_k))
        places = placements(ffn.num_experts, top_k, num_ranks, ffn.num_groups)
        rows = np.array([placed.rows(count) for placed, count in zip(places, counts, strict=True)])
        heaviest = rows[np.arange(len(rows)), rows.sum(axis=2).argmax(axis=1)]
        tiles = np.ceil(heaviest[:, :, None] / _TILES).sum(axis=1).mean(axis=0)
        means = (heaviest > 0).sum(axis=1).mean(), heaviest.sum(axis=1).mean()
        return ExpertLoad(float(means[0]), float(means[1]), tuple(tiles.tolist()))

    return route


def _power_law(uniform: Values, exponent: float) -> Values:
    """Map uniform numbers to density x^-exponent on [1, _MAX_POPULAR]."""
    if abs(exponent - 1.0) < 1e-9:
        return np.asarray(_MAX_POPULAR**uniform)
    power = 1.0 - exponent
    return np.asarray((1.0 + (_MAX_POPULAR**power - 1.0) * uniform) ** (1.0 / power))


def _inclusion(popularity: Values, top_k: int) -> Values:
    """Inclusion chances: proportional to popularity, none above 1, k in sum."""
    chances: Values = popularity * (top_k / popularity.sum(axis=1, keepdims=True))
    for _ in range(popularity.shape[1]):
        full = chances >= 1.0
        missing = top_k - np.minimum(chances, 1.0).sum(axis=1, keepdims=True)
        if (missing < 1e-9).all():
            break
        free = np.where(full, 0.0, chances)
        chances = np.where(full, 1.0, chances * (1.0 + missing / np.maximum(free.sum(axis=1, keepdims=True), 1e-30)))
    return np.asarray(np.minimum(chances, 1.0))


def capacity_rows(ffn: MoEFFN, num_tokens: int, factor: float) -> int:
    """C, at most `num_tokens`."""
    return min(num_tokens, ceil(factor * num_tokens * min(ffn.top_k, ffn.num_experts) / ffn.num_experts - 1e-9))


def with_capacity(factor: float) -> Routing:
    """Load of any rank when each expert multiplies C rows."""

    def route(ffn: MoEFFN, num_tokens: int, num_ranks: int) -> ExpertLoad:
        local, rows = ceil(ffn.num_experts / num_ranks), capacity_rows(ffn, num_tokens, factor)
        tiles = tuple(float(local * ceil(rows / size)) for size in TILE_ROWS)
        return ExpertLoad(float(local if rows else 0), float(local * rows), tiles)

    return route


def dropped_share(ffn: MoEFFN, num_tokens: int, factor: float, chances: NDArray[np.float64]) -> float:
    """Expected share of (token, expert) pairs beyond capacity `factor` c, for num_tokens of all ranks.

    ffn: the block; chances: (draws, experts), each expert's chance to be among a token's k. Rows are binomial; the mean
    of max(X - C, 0) is over a normal's quantiles, and exactly 0 where C holds all tokens."""
    rows = capacity_rows(ffn, num_tokens, factor)
    if rows >= num_tokens:
        return 0.0
    counts = np.random.default_rng(num_tokens).binomial(num_tokens, np.tile(chances, (64, 1)))
    return float(np.maximum(counts - rows, 0).sum() / counts.sum())


_LEAST = 1e-6  # dispersion below which nobody could tell it from none
# Rows per expert up to which the distribution is summed; above, quantiles of popularity stand for it.
_EXACT_SPREAD_BELOW = 96.0
_TAIL = 12.0  # standard deviations that are summed
_GRID = 4096
_NUM_QUANTILES = 128


def dispersed_tiles(num_tokens: int, probability: float, dispersion: float) -> tuple[float, Values]:
    """P(an expert gets a token), and E ceil(X / t) of its X tokens for each t in TILE_ROWS."""
    most = (1.0 - probability) / probability  # dispersion that probabilities up to 1 allow
    total = most / min(dispersion, 0.9 * most) - 1.0
    a, b = probability * total, (1.0 - probability) * total  # of the beta distribution
    never = exp(lgamma(b + num_tokens) - lgamma(b) + lgamma(a + b) - lgamma(a + b + num_tokens))
    mean = num_tokens * probability
    if mean > _EXACT_SPREAD_BELOW:
        rows = num_tokens * _quantiles(a, b)
        return 1.0 - never, np.ceil(rows[:, None] / _TILES).mean(axis=0)
    deviation = sqrt(mean + dispersion * mean**2)
    i = np.arange(min(num_tokens, int(mean + _TAIL * deviation + 8.0)))
    steps = np.log((num_tokens - i) * (a + i)) - np.log((i + 1.0) * (b + num_tokens - i - 1.0))
    mass = never * np.exp(np.cumsum(np.append(0.0, steps)))
    above = np.maximum(1.0 - np.cumsum(mass), 0.0)  # P(X > i)
    return 1.0 - never, np.array([above[::t].sum() for t in TILE_ROWS])


@lru_cache(maxsize=64)
def _quantiles(a: float, b: float) -> Values:
    """Beta quantiles of equal weight, with the exact mean."""
    edges = np.linspace(0.0, 1.0, _GRID + 1) ** 3  # finer where a density of a < 1 is steep
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    density = (a - 1.0) * np.log(middles) + (b - 1.0) * np.log1p(-middles)
    mass = np.cumsum(widths * np.exp(density - density.max()))
    quantiles = np.interp((np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES, mass / mass[-1], edges[1:])
    return np.asarray(np.minimum(quantiles * (a / (a + b) / quantiles.mean()), 1.0))


class _Placed(NamedTuple):
    """What EPLB leaves: `loads` of ranks over the mean, the sums of their slots' `squares`, `dispersion` of slots."""

    loads: Values
    squares: Values
    dispersion: float


@lru_cache(maxsize=64)
def _placed(
    dispersion: float, num_experts: int, top_k: int, num_ranks: int, num_redundant: int, num_groups: int, nodes: int
) -> _Placed:
    """Means over seeded draws of popularity."""
    p = top_k / num_experts
    total = (1.0 - p) / (min(dispersion, 0.9 * (1.0 - p) / p) * p) - 1.0
    draws = np.random.default_rng((_SEED, num_experts, top_k)).beta(p * total, (1.0 - p) * total, (8, num_experts))
    left = []
    for chances in _inclusion(draws, top_k):
        placed = place_experts(chances, num_ranks, num_redundant, num_groups, nodes)
        slots = np.where(placed.expert < 0, 0.0, (chances / placed.copies)[placed.expert]) * (num_ranks / top_k)
        slots = slots[slots.sum(axis=1).argsort()]
        left.append(_Placed(slots.sum(axis=1), (slots**2).sum(axis=1), float(slots.var() / slots.mean() ** 2)))
    loads, squares, dispersions = zip(*left, strict=True)
    return _Placed(np.mean(loads, axis=0), np.mean(squares, axis=0), float(np.mean(dispersions)))


def _largest_placed(placed: _Placed, noise: float, drift: float) -> float:
    """The largest of normals: end - integral of the product of their distributions; no less than that of equal ranks.

    noise, drift: relative variances of a rank with the mean load, and of a slot"""
    deviations = np.sqrt(noise * placed.loads + drift * placed.squares)
    top, step = float(placed.loads.max()), float(deviations.max()) / 4.0
    x = top + step * np.arange(-16.0, 25.0)
    below = np.interp((x[:, None] - placed.loads) / deviations, _DEVIATIONS, _BELOW).prod(axis=1)
    largest = x[-1] - step * (below.sum() - (below[0] + below[-1]) / 2.0)
    return max(float(largest), largest_load(len(placed.loads), noise, drift * float(placed.squares.mean())))


def dispersed_routing(
    dispersion: float, num_redundant: int | None = None, ranks_per_node: int | None = None
) -> Routing:
    """Expected load of the most loaded rank when popularity has this `dispersion` (phi).

    num_redundant, ranks_per_node: as for `skewed_routing`"""
    placing = num_redundant, ranks_per_node
    return partial(_slowest, dispersion, placing) if dispersion > _LEAST else slowest_uniform_routing


@lru_cache(maxsize=65536)
def _slowest(
    dispersion: float, placing: tuple[int | None, int | None], ffn: MoEFFN, num_tokens: int, num_ranks: int
) -> ExpertLoad:
    num_redundant, ranks_per_node = placing
    local, top_k = ceil(ffn.num_experts / num_ranks), min(ffn.top_k, ffn.num_experts)
    if top_k == ffn.num_experts or not num_tokens:
        return slowest_uniform_routing(ffn, num_tokens, num_ranks)
    probability = top_k / ffn.num_experts
    if num_ranks > 1:  # the chance to choose an expert of the most loaded rank
        total, rows = num_tokens * top_k, num_tokens * local * probability
        if num_redundant is None:
            most = rows * largest_load(num_ranks, (1.0 - probability) / rows, dispersion / local)
        else:
            nodes = ceil(num_ranks / (ranks_per_node or num_ranks))
            placed = _placed(dispersion, ffn.num_experts, top_k, num_ranks, num_redundant, ffn.num_groups, nodes)
            rows, local = total / num_ranks, ceil((ffn.num_experts + num_redundant) / num_ranks)
            most = rows * _largest_placed(placed, (1.0 - probability) / rows, _DRIFT * dispersion)
            dispersion = placed.dispersion
        probability = min(most, total, num_tokens * local * 0.999) / (num_tokens * local)
    chance, tiles = dispersed_tiles(num_tokens, probability, dispersion)
    return ExpertLoad(local * chance, local * num_tokens * probability, tuple((local * tiles).tolist()))
