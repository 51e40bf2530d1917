"""`Speculation`: how far a request that decodes drafts in a step, in tokens and sequences.

A step verifies, beside the newest token of each request, the tokens drafted after it. `StepPlan.draft_depths` says how
deep each request drafts, `nodes` how many tokens those are: a chain has one at each depth, a tree several. What was
right is in `Outcome.num_accepted`, for each request of `decodes`: between 0 and its depth. The request then has 1
token more than that, and the rest was wasted: its counts never advanced, its blocks are kept for what comes.

No request drafts past its end: a request that lacks n tokens drafts at most n - 1 deep, since one token comes in any
case. Nor does it draft more than the token budget of the step leaves it.

Pipelined, the drafter works on what follows while the model verifies. Then `num_accepted` may be depth + 1: all drafted
tokens were right, and so was the drafter about the token that the model adds itself. Only then does the request have a
draft to verify in the next step; with anything less the drafter starts anew behind what was right, and the next step
brings one token while it does. A request that has just begun to decode, and one that was left out, starts likewise.
"""

__all__ = ["AcceptanceEstimate", "Speculation"]

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speculation:
    """
    nodes:       tokens verified beside the newest when drafting 0, 1, 2 ... deep; nodes[0] is 0
    depths:      how deep to draft, by the number of requests that decode in the step (from 1; the last repeats); a row
                 for each of as many equal parts of [0, 1] in which the estimated acceptance may lie; () = all the way
    disable_by_batch_size: steps in which more requests decode draft nothing
    pipelined:   the next draft is made while this one is verified
    estimate:    where the estimate of acceptance begins
    """

    nodes: tuple[int, ...]
    depths: tuple[tuple[int, ...], ...] = ()
    disable_by_batch_size: int | None = None
    pipelined: bool = False
    estimate: float = 1.0

    @property
    def depth(self) -> int:
        """The deepest that a request drafts."""
        return len(self.nodes) - 1

    @property
    def spare_slots(self) -> int:
        """KV slots beyond a request's last token that a step may need: a tree has more nodes than it brings tokens."""
        return max(nodes - depth for depth, nodes in enumerate(self.nodes))

    def depth_at(self, num_decodes: int, acceptance: float) -> int:
        """How deep requests draft in a step in which so many decode, with acceptance estimated as that."""
        if self.disable_by_batch_size is not None and num_decodes > self.disable_by_batch_size:
            return 0
        if not self.depths:
            return self.depth
        row = self.depths[min(int(acceptance * len(self.depths)), len(self.depths) - 1)]
        return row[min(num_decodes, len(row)) - 1]

    def depth_within(self, depth: int, num_slots: int) -> int:
        """The deepest draft, at most `depth`, of no more than `num_slots` tokens."""
        while depth and self.nodes[depth] > num_slots:
            depth -= 1
        return depth


class AcceptanceEstimate:
    """Recent acceptance rate: the share of judged tokens that were right, fading over some `_MEMORY` judged tokens.

    A token is judged when all before it were right. Where nothing is drafted for lack of promise, nothing would ever be
    judged again: then the estimate goes back, slowly, to where it began.
    """

    _MEMORY = 500.0

    def __init__(self, start: float) -> None:
        self.value = self._start = start
        self._judged = self._MEMORY
        self._right = self._MEMORY * start

    def add(self, num_judged: int, num_right: float) -> None:
        """Count a step's judged tokens and those of them that were right."""
        kept = self._MEMORY / (self._MEMORY + num_judged)
        self._judged = (self._judged + num_judged) * kept
        self._right = (self._right + num_right) * kept
        self.value = self._right / self._judged

    def fade(self) -> None:
        """A step has passed in which nothing was drafted, since it did not promise to pay."""
        self.add(1, self._start)
