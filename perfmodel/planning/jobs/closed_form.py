"""How long a job takes on so many replicas of each candidate, in closed form, for all of them at once.

Steady state. All slots are taken, so that a step of b sequences brings b e tokens (e: tokens a step brings each), and
b e / o answers of o tokens leave room for as many prompts of m tokens. Where the budget B has no room for both, prompts
hold sequences back:

    c = b e m / o    prompt tokens a step;    b = slots, or o B / (m e + o) if b + c exceeds B
    X = b e / (o T)  requests a second, T the step's time with its prompts

Tail. When the last prompt is let in, answers under way have a rest r left, distributed as the age of a renewal process
(density P(answer > r) / mean); they end one after the other, in ever smaller batches. Of n requests on a replica

    t = n / X - rests at the full batch + integral over r of decode(b P(rest > r)) / e

A job that has no more requests than slots computes all prompts, then the same with whole answers for rests. Equal
requests go in rounds instead, which the last term overstates by at most half a round (the simulator has them right).

Of k engines the last counts. Its longest answer is the longest of all; and the tokens that its n answers happen to have
exceed the mean by as many standard deviations, s n^(1/2), as the largest of k normal scores (Blom 1958).
"""

__all__ = ["JobTimes", "job_times"]

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from perfmodel.planning.screening.demand import Demand
from perfmodel.planning.screening.service import mean_context
from perfmodel.planning.screening.surfaces import Surfaces

Floats = NDArray[np.float64]

_PARTS = 48  # of the tail


@dataclass(frozen=True)
class JobTimes:
    """A row of one column for each candidate. seconds: of the job; pace: requests a second of an engine while its slots
    are taken; batch: sequences that decode then."""

    seconds: Floats
    pace: Floats
    batch: Floats


def job_times(
    surfaces: Surfaces, slots: Floats, budget: Floats, engines: Floats, requests: Floats, demand: Demand
) -> JobTimes:
    """Times of a job of `requests` on each of `engines` engines, with `slots` sequences and `budget` tokens in a step.

    surfaces: step times of the candidates; demand: lengths of the job's prompts and answers
    """
    prompt, answer = demand.mean_prompt, demand.mean_outputs
    full, step = _steady(surfaces, slots, budget, demand)
    brought = surfaces.tokens(full)
    pace = full * brought / (answer * step)
    batch = np.minimum(full, requests)
    alone = surfaces.decode(np.maximum(batch, 1.0)) / surfaces.tokens(np.maximum(batch, 1.0))
    rests = _rests(demand.outputs)
    mean_rest = float((demand.outputs**2).sum() / (2 * demand.outputs.sum()))
    ahead = ndtri((engines - 0.375) / (engines + 0.25)) * np.sqrt(requests) * float(demand.outputs.std())
    many = requests / pace - mean_rest * alone + _drained(surfaces, batch, engines, *rests)
    many = many + np.maximum(ahead, 0.0) * alone / batch
    room = np.maximum(budget - batch / 2, 1.0)
    steps = np.maximum(requests * prompt / room, 1.0)
    context = mean_context(surfaces, demand, room)
    prompts = steps * surfaces.beside(batch / 2, np.minimum(requests * prompt, room)) + requests * context
    few = prompts + _drained(surfaces, batch, engines, *_whole(demand.outputs))
    return JobTimes(np.where(requests > full, many, few), pace, full)


def _steady(surfaces: Surfaces, slots: Floats, budget: Floats, demand: Demand) -> tuple[Floats, Floats]:
    """Sequences that decode, and seconds of a step."""
    prompt, answer = demand.mean_prompt, demand.mean_outputs
    brought = surfaces.tokens(slots)
    held_back = answer * budget / (prompt * brought + answer)
    batch = np.maximum(np.minimum(slots, held_back), 1.0)
    tokens = np.minimum(batch * brought * prompt / answer, np.maximum(budget - batch, 1.0))
    size = np.minimum(np.maximum(tokens, prompt), np.maximum(budget - batch, 1.0))
    share = tokens / size  # of steps that have prompts: whole ones, where a step's share is less than one
    step = (1 - share) * surfaces.decode(batch) + share * surfaces.beside(batch, size)
    return batch, step + tokens / prompt * mean_context(surfaces, demand, np.maximum(budget - batch, 1.0))


def _whole(outputs: Floats) -> tuple[Floats, Floats]:
    """(share of answers that are at most so long, so long)."""
    lengths = np.sort(outputs)
    return (np.arange(len(lengths)) + 1.0) / len(lengths), lengths


def _rests(outputs: Floats) -> tuple[Floats, Floats]:
    """(share of answers under way that have at most so much left, so much)."""
    lengths = np.concatenate([[0.0], np.sort(outputs)])
    longer = 1.0 - np.arange(len(outputs)) / len(outputs)  # share of answers above lengths[i]
    shares = np.concatenate([[0.0], np.cumsum(longer * np.diff(lengths))])
    return shares / shares[-1], lengths


def _drained(surfaces: Surfaces, batch: Floats, engines: Floats, shares: Floats, lengths: Floats) -> Floats:
    """Seconds until the last of `batch` answers on each engine ends, of lengths distributed so."""
    last = 0.5 / np.maximum(batch * engines, 1.0)
    left = last ** (np.arange(_PARTS + 1)[None, :] / _PARTS)  # from all to the last
    ends = np.interp(1.0 - left, shares, lengths)
    ends[:, 0] = 0.0
    between = np.maximum(batch * np.sqrt(left[:, 1:] * left[:, :-1]), 1.0)
    step = surfaces.decode(between) / surfaces.tokens(between)
    found: Floats = (np.diff(ends, axis=1) * step).sum(axis=1, keepdims=True)
    return found
