"""What passes between the scheduler and a backend: plans, outcomes, step records."""

__all__ = ["Backend", "Grant", "Outcome", "StepPlan", "StepRecord"]

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

from perfmodel.engine.request import Request


class Grant(NamedTuple):
    """`num_new_tokens` of `request`, following the `num_computed_tokens` whose KV is already there."""

    request: Request
    num_computed_tokens: int
    num_new_tokens: int


@dataclass(slots=True)
class StepPlan:
    """The tokens that run in one step, and nothing about how long they take.

    Decode, chunked prefill and a prefix hit are readings of the grants. Grants of one token to sequences whose other
    tokens are all computed are kept apart in `decodes`, because their number and summed context say all that a cost
    model needs: `grants` gives them all.

    decodes:        requests granted one token each, with all earlier tokens computed
    decode_context: sum over `decodes` of the tokens in their KV, the new one included
    chunks:         every other grant
    samples:        requests of `chunks` that will have a new output token after this step
    preempted:      requests that lost their blocks while this plan was made
    """

    index: int
    decodes: list[Request] = field(default_factory=list)
    decode_context: int = 0
    chunks: list[Grant] = field(default_factory=list)
    samples: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(grant.num_new_tokens for grant in self.chunks)

    @property
    def num_samples(self) -> int:
        """Sequences that sample an output token."""
        return len(self.decodes) + len(self.samples)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def fingerprint(self) -> str:
        """A hash of what the plan decides; equal plans of two runs have equal fingerprints."""
        text = ";".join(
            [f"{r.request_id}:1" for r in self.decodes]
            + [f"{g.request.request_id}:{g.num_computed_tokens}+{g.num_new_tokens}" for g in self.chunks]
            + [f"-{r.request_id}" for r in self.preempted]
        )
        return blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step: how long it took, in ticks, and the sampled tokens if anyone looks at them."""

    duration: int
    tokens: Sequence[int] | None = None


class Backend(Protocol):
    """Executes plans. The simulated one asks a cost model, the executed one runs kernels."""

    def execute(self, plan: StepPlan) -> Outcome:
        """Run `plan` to its end."""
        ...


class StepRecord(NamedTuple):
    """One executed step, or `num_steps` equal decode steps advanced together. Times in ticks.

    `first_duration` is that of the first of them; durations grow linearly to make up `end - start`.
    """

    index: int
    num_steps: int
    start: int
    end: int
    first_duration: int
    num_tokens: int
    num_decodes: int
    decode_context: int
    num_chunks: int
    num_running: int
    num_waiting: int
    used_blocks: int
