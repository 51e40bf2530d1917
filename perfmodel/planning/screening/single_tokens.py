"""What single tokens of an answer meet, in closed form: the longest gap, and how long a reader waits.

Arrays are those of `service`: a row for each candidate, a column for each typical request.
"""

__all__ = ["SCORES", "SingleTokens", "exponential", "held_steps", "longest_gap", "square_of_some"]

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from perfmodel.planning.screening.demand import NUM_TYPICAL, Demand
from perfmodel.planning.screening.surfaces import Surfaces

Floats = NDArray[np.float64]

# Even, independent-looking places in the unit cube for each typical request: an additive recurrence (Roberts 2018).
_PHI = 1.2207440846057596  # the root of x^4 = x + 1: three dimensions
SCORES = np.array([(0.5 + (np.arange(NUM_TYPICAL) + 1) * _PHI**-k) % 1.0 for k in (1, 2, 3, 4)])


def exponential(score: Floats, chance: Floats, mean: Floats) -> Floats:
    """A wait that is nothing but with a chance, and then exponential, at a score between 0 and 1."""
    return np.where(score < chance, -mean * np.log(np.maximum(score / np.maximum(chance, 1e-12), 1e-12)), 0.0)


def held_steps(arrived: Floats, extra: Floats, extra_square: Floats) -> tuple[Floats, Floats, Floats]:
    """Steps that prompts make longer: the share of steps with any, what these add, and its mean square, in seconds.

    arrived: prompts per step, Poisson; extra, extra_square: mean and mean square of what one adds, s and s2
    """
    share = np.maximum(1.0 - np.exp(-arrived), 1e-12)
    mean = extra * arrived / share
    return share, mean, square_of_some(arrived, mean, extra_square)


def square_of_some(arrived: Floats, mean: Floats, extra_square: Floats) -> Floats:
    """Mean square of a sum of a Poisson number of terms, given that it has any: (l s2 + (l s)^2) / (1 - exp(-l)).

    arrived: l; mean: l s / (1 - exp(-l)), of the sums that have any; extra_square: s2, the mean square of one term
    """
    share = np.maximum(1.0 - np.exp(-arrived), 1e-12)
    return arrived / share * extra_square + share * mean**2


@dataclass(frozen=True)
class SingleTokens:
    """Seconds.

    gap:     the longest between two tokens
    pace:    between two tokens that no prompt holds up
    held:    (share of steps that prompts hold up, mean and mean square of by how much)
    at_once: chance that the steps after the first token are: prompts came while the own one was computed
    """

    gap: Floats
    pace: Floats
    held: tuple[Floats, Floats, Floats]
    at_once: Floats

    def reader_wait(self, speed: float) -> Floats:
        """How long a reader of so many tokens a second waits in all, but for what the last token is late.

        Each token puts r = 1 / speed - pace by, and a step that prompts hold up by w takes w from it. With q, the share
        of such steps, the walk never falls below where it began with probability (1 - q w / r) / (1 - q) (steps down by
        one unit only: Feller 1968, section XIV.9), and what it falls by is a waiting time of M/G/1 (duality),
        exponential with the mean of Pollaczek and Khinchine. Prompts that came while the own one was computed hold up
        the first tokens, for which next to nothing is put by (r for each of two).
        """
        share, mean, square = self.held
        spare = 1.0 / speed - self.pace
        load = share * mean / np.maximum(spare, 1e-12)
        falls = np.clip(1.0 - (1.0 - load) / (1.0 - share), 0.0, 1.0)
        depth = square / np.maximum(2 * mean * (1.0 - np.minimum(load, 0.99)), 1e-12)
        spread = np.sqrt(np.log(np.maximum(square / np.maximum(mean, 1e-12) ** 2, 1.01)))  # of a lognormal
        far = np.log(np.maximum(mean, 1e-12) / np.maximum(2 * spare, 1e-12)) / spread - spread / 2
        early = self.at_once * ndtr(far)
        depth = np.maximum(depth, early * mean)
        return exponential(SCORES[0][None, :], early + (1.0 - early) * falls, depth)


def longest_gap(
    surfaces: Surfaces,
    budget: Floats,
    demand: Demand,
    rate: Floats,
    batch: Floats,
    step: Floats,
    long: Floats,
) -> Floats:
    """Seconds of the longest step that a request meets while it decodes: with the largest of the prompts that come in
    its life, L of them on average, which is at most m with probability exp(-L P(prompt > m)), and those that came in
    the `long` seconds of steps with prompts before.

    rate: requests/s; batch: sequences that decode; step: seconds of a step; budget: tokens of a step
    surfaces: step times; demand: lengths of prompts and answers
    """
    outputs = demand.typical[2][None, :]
    prompts = np.maximum(rate * np.maximum(outputs - 1, 0.0) * step, 1e-12)
    share = 1.0 + np.log(SCORES[0][None, :]) / prompts  # of prompts that are at most as large
    lengths = np.sort(demand.prompt)
    largest = np.interp(share, (np.arange(len(lengths)) + 0.5) / len(lengths), lengths)
    tokens = np.minimum(largest + rate * long * demand.mean_prompt, np.maximum(budget - batch, 1.0))
    alone = surfaces.decode(batch)
    found: Floats = np.where(share > 0, np.maximum(surfaces.beside(batch, tokens), alone), alone)
    return found
