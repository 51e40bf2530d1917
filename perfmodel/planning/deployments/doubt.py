"""Decisions under doubt: replicas that are enough in a wanted share of draws, what being short costs, what knowing is
worth.

A draw is one plausible state of what calibrations leave unexplained, common to all options (`screening.surfaces`). In
it an option needs so many replicas. One that has fewer misses the SLO, and missing it is priced as the replicas that
are then added, at their own price: at most as much as the surest option costs, which is taken instead.

Knowing a device is to know the needs of all options on it in the draw at hand. The value of it is what the decision
costs less on average: for each draw the cheapest of what is then known to serve, or of what the others cost on
average. Keeping the choice is among these, so the value is never negative.

Source of the rule: expected value of perfect information, Raiffa and Schlaifer 1961.
"""

__all__ = ["Certainty", "Measurement", "Option", "certainty_of", "pick", "replicas_for"]

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Option:
    """A deployment that may be taken.

    name:     of it without its replicas
    device:   what is to be measured to know it
    price:    of a replica: USD per hour, or devices where there is no price
    fewest:   replicas that serve as long as predictions are exact
    replicas: that it is to have; most: that it may have
    needed:   replicas that serve, for each draw; infinite where none do
    figure:   by which options are compared, smaller is better; its cost unless given
    load:     replicas that the rate takes, as a fraction
    """

    name: str
    device: str
    price: float
    fewest: int
    replicas: int
    most: int
    needed: Floats
    figure: float | None = None
    load: float = 0.0

    @property
    def cost(self) -> float:
        return self.price * self.replicas

    @property
    def share(self) -> float:
        """The share of draws in which its replicas suffice."""
        return float(np.mean(self.needed <= self.replicas))

    def enough(self, allowed: Sequence[int], confidence: float) -> int:
        """The fewest replicas of `allowed`, no fewer than its own, that suffice in the share `confidence` of the draws;
        the most where none do."""
        counts = [count for count in allowed if count >= self.replicas]
        wanted = replicas_for(self.needed, self.replicas, confidence)
        return next((count for count in counts if count >= wanted), max(counts, default=self.replicas))

    def bills(self, cap: float) -> Floats:
        """What it costs in each draw, replicas that have to be added included: of these at most `cap`."""
        missing = np.maximum(self.needed - self.replicas, 0.0)
        found: Floats = self.cost + np.minimum(missing * self.price, cap)
        return found

    def known_bills(self, cap: float) -> Floats:
        """What it costs in each draw if its needs are known before it is bought."""
        exact = np.where(self.needed <= self.most, np.maximum(self.needed, 1.0) * self.price, inf)
        found: Floats = np.minimum(exact, self.bills(cap))
        return found


@dataclass(frozen=True)
class Measurement:
    """What it is worth to measure one replica on a device before anything is bought.

    value: by which the expected cost falls; price: of one replica, for as long
    short: the share of draws in which the replicas do not suffice, once the measurement has been heeded
    """

    device: str
    value: float
    price: float
    short: float


@dataclass(frozen=True)
class Certainty:
    """How sure a choice is, and what that costs.

    share:      of draws in which its replicas suffice; `confidence`: what was wanted
    expected:   cost of each option, the price of missing the SLO included, by name; `cap`: the most that missing costs
    plain:      what would be taken if predictions were exact: name, replicas, cost, and the share in which it suffices
    measurements: by their value, the highest first
    """

    confidence: float
    share: float
    cost: float
    expected: dict[str, float]
    cap: float
    plain: tuple[str, int, float, float]
    measurements: Sequence[Measurement]

    @property
    def is_reached(self) -> bool:
        """Whether the choice is as sure as was wanted."""
        return self.share >= self.confidence

    @property
    def extra_cost(self) -> float:
        """What being so sure costs beyond what would be taken if predictions were exact."""
        return self.cost - self.plain[2]


def replicas_for(needed: Floats, fewest: int, confidence: float) -> float:
    """The fewest replicas, at least `fewest`, that suffice in the share `confidence` of the draws; may be infinite."""
    rank = ceil(confidence * len(needed) - 1e-9)
    enough = -inf if rank <= 0 else float(np.sort(needed)[rank - 1])
    return max(float(fewest), enough)


def pick(options: Sequence[Option], confidence: float) -> int:
    """The place of the choice: of those that suffice in the share `confidence` of the draws the best by its figure,
    then by its expected cost, then by its headroom; the surest where none suffices so often."""
    cap = _surest(options).cost
    sure = [place for place, option in enumerate(options) if option.share >= confidence]
    if not sure:
        return min(range(len(options)), key=lambda place: (-options[place].share, options[place].cost))

    def key(place: int) -> tuple[float, float, float]:
        option = options[place]
        figure = option.cost if option.figure is None else option.figure
        return figure, float(option.bills(cap).mean()), option.load / option.replicas

    return min(sure, key=key)


def certainty_of(options: Sequence[Option], choice: int, confidence: float) -> Certainty:
    """How sure the option at place `choice` is, beside the others."""
    cap, chosen = _surest(options).cost, options[choice]
    expected = {each.name: float(each.bills(cap).mean()) for each in options}
    plain = min(options, key=lambda each: each.fewest * each.price if each.figure is None else each.figure)
    plain_share = float(np.mean(plain.needed <= plain.fewest))
    found = [_measured(device, options, chosen, cap) for device in dict.fromkeys(each.device for each in options)]
    return Certainty(
        confidence,
        chosen.share,
        chosen.cost,
        expected,
        cap,
        (plain.name, plain.fewest, plain.fewest * plain.price, plain_share),
        sorted(found, key=lambda each: -each.value),
    )


def _measured(device: str, options: Sequence[Option], chosen: Option, cap: float) -> Measurement:
    """What knowing the options on `device` is worth."""
    on_it = [each for each in options if each.device == device]
    others = [each for each in options if each.device != device]
    best = min(others, key=lambda each: float(each.bills(cap).mean()), default=None)
    elsewhere = inf if best is None else float(best.bills(cap).mean())
    known = np.min([each.known_bills(cap) for each in on_it], axis=0)
    value = float(chosen.bills(cap).mean() - np.minimum(known, elsewhere).mean())
    never = np.min([np.where(each.needed <= each.most, 0.0, 1.0) for each in on_it], axis=0)
    short = np.where(known <= elsewhere, never, 1.0 - best.share if best is not None else never)
    return Measurement(device, value, min(each.price for each in on_it), float(short.mean()))


def _surest(options: Sequence[Option]) -> Option:
    return min(options, key=lambda each: (-each.share, each.cost))
