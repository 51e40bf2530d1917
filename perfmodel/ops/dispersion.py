"""Which experts tokens go to where some are more popular than others, without saying which: the load of one rank.

An expert is among a token's k with a probability of its own, drawn from a beta distribution of mean p = k / E:

    variance = phi p^2,   a = p s,   b = (1 - p) s,   s = (1 - p) / (phi p) - 1

phi is the dispersion: 0 is uniform routing, 1 spreads popularity as an exponential distribution does. The tokens X of
an expert among n are then beta-binomial, and in closed form

    P(X = 0) = B(a, b + n) / B(a, b)        so that fewer distinct experts are read than under uniform routing
    P(X = i + 1) / P(X = i) = (n - i) (a + i) / ((i + 1) (b + n - i - 1))

One token still has exactly k experts. A rank that holds E / R of them is loaded by the sum of so many draws: its share
varies by sqrt(phi R / E) of itself more than tokens that choose independently make it vary.

Source: Skellam 1948 (beta-binomial). Phi is fitted to servers (`perfmodel calibrate --routing`): routers trained to
balance their experts over a corpus do not do so over the tokens of a batch.
"""

from functools import lru_cache, partial
from math import ceil, exp, lgamma, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import TILE_ROWS, ExpertLoad, Routing, slowest_uniform_routing

Values = NDArray[np.float64]

_TILES = np.array(TILE_ROWS, dtype=np.float64)
_LEAST = 1e-6  # dispersion below which nobody could tell it from none
_EXACT_BELOW = (
    96.0  # rows per expert up to which the distribution is summed; above, quantiles of popularity stand for it
)
_TAIL = 12.0  # standard deviations that are summed
_GRID = 4096
_NUM_QUANTILES = 128


def _shapes(probability: float, dispersion: float) -> tuple[float, float]:
    """a and b of the beta distribution; the dispersion is at most what probabilities up to 1 allow."""
    most = (1.0 - probability) / probability
    total = most / min(dispersion, 0.9 * most) - 1.0
    return probability * total, (1.0 - probability) * total


def dispersed_tiles(num_tokens: int, probability: float, dispersion: float) -> tuple[float, Values]:
    """The chance that an expert gets a token, and E ceil(X / t) of its X tokens, for each t in TILE_ROWS."""
    a, b = _shapes(probability, dispersion)
    never = exp(lgamma(b + num_tokens) - lgamma(b) + lgamma(a + b) - lgamma(a + b + num_tokens))
    mean = num_tokens * probability
    if mean > _EXACT_BELOW:
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
    """Quantiles of the beta distribution, each standing for as many experts; their mean is its mean."""
    edges = np.linspace(0.0, 1.0, _GRID + 1) ** 3  # finer where a density of a < 1 is steep
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    density = (a - 1.0) * np.log(middles) + (b - 1.0) * np.log1p(-middles)
    mass = np.cumsum(widths * np.exp(density - density.max()))
    found = np.interp((np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES, mass / mass[-1], edges[1:])
    return np.asarray(np.minimum(found * (a / (a + b) / found.mean()), 1.0))


def dispersed_routing(dispersion: float, is_balanced: bool = False) -> Routing:
    """The expected load of the rank that gets most, where popularity has so much `dispersion` (phi).

    is_balanced: experts are placed and copied so that popularity is the same on all ranks; how many tokens a step
    sends them still differs
    """
    return partial(_slowest, dispersion, is_balanced) if dispersion > _LEAST else slowest_uniform_routing


@lru_cache(maxsize=65536)
def _slowest(dispersion: float, is_balanced: bool, ffn: MoEFFN, num_tokens: int, num_ranks: int) -> ExpertLoad:
    local, top_k = ceil(ffn.num_experts / num_ranks), min(ffn.top_k, ffn.num_experts)
    if top_k == ffn.num_experts or not num_tokens:
        return slowest_uniform_routing(ffn, num_tokens, num_ranks)
    probability = top_k / ffn.num_experts
    if num_ranks > 1:
        probability = _heaviest(0.0 if is_balanced else dispersion, probability, local, num_tokens, num_ranks)
    chance, tiles = dispersed_tiles(num_tokens, probability, dispersion)
    return ExpertLoad(local * chance, local * num_tokens * probability, tuple((local * tiles).tolist()))


def _heaviest(dispersion: float, probability: float, local: int, num_tokens: int, num_ranks: int) -> float:
    """How likely a token chooses an expert of the rank that gets most of `num_ranks` with `local` experts each."""
    above = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))  # as of uniform routing
    rows = num_tokens * local * probability
    relative = (1.0 - 1.0 / num_ranks) * (1.0 / rows + dispersion / local)
    total = num_tokens * local * num_ranks * probability
    most = min(rows * (1.0 + above * sqrt(relative)), total, num_tokens * local * 0.999)
    return most / (num_tokens * local)
