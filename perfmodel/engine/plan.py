"""What passes between the scheduler and a backend: plans, outcomes, step records."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from perfmodel.engine.request import Request


class Grant(NamedTuple):
    """`num_new_tokens` of `request`, following the `num_computed_tokens` whose KV is already there."""

    request: Request
    num_computed_tokens: int
    num_new_tokens: int


class StepPlan:
    """The tokens that run in one step, and nothing about how long they take.

    Decode, chunked prefill and a prefix hit are readings of the grants. Grants of one token to sequences whose other
    tokens are all computed are kept apart in `decodes`, because their number and summed context say all that a cost
    model needs; `grants` gives them all.

    decodes:         requests granted one token each, with all earlier tokens computed; and what they draft beside it
    draft_depths:    how deep each of `decodes` drafts, in their order (0: it only decodes); empty without drafts.
                     Pipelined drafters work on what comes after all `decodes` of a plan with depths, of 0, too
    padded:          requests that are admitted for one token, which is padded to the length of a verification, and the
                     padding of all, in tokens: computed in vain (vLLM, so that one CUDA graph fits the step)
    num_wasted_tokens: once applied, tokens of requests that ended with the plan before, after this one was made; these
                     are not among `decodes` any more
    num_draft_tokens: drafted tokens that the step verifies, over all `decodes`: all nodes of a tree (`Speculation`)
    decode_context:  sum over `decodes` of the tokens in their KV, the new one included, drafted ones not
    decode_windowed: for each span of the scheduler's config, the sum over `decodes` of min(KV tokens, span)
    num_accepted_tokens: once applied, how many drafted tokens were right
    num_accepted:    once applied, the `Outcome`'s, where there are `draft_depths`
    chunks:          every other grant
    samples:         requests of `chunks` that have a new output token after this step
    singles:         requests of `decodes` whose one token ends a prompt, or a sequence to recompute
    resumed:         requests of `decodes` whose previous output token came earlier than in the step before
    group_tokens:    tokens of the plans of all ranks that step together with this one; 0: it steps alone
    num_stalled:     how many more of `decodes` that is true for, their previous tokens having come in one step
    cohort_age:      the age of the `DecodeCohort` with this plan, if it granted its members anything, else 0
    loads:           requests whose KV begins to come from elsewhere with this plan, into blocks that they have now; or
                     need not come, of those that run, since it is in the prefix cache
    preempted:       requests that lost their blocks while this plan was made
    num_restored_tokens, num_restored_blocks: KV that comes back from a second tier for this step (`HostBlocks`)
    num_stored_blocks: blocks that go there before this step, where it waits for them
    num_gaps:        once applied, how many requests had their next token right after the last one's step
    is_complete:     every running request with tokens to compute has a grant
    positions:       tokens computed before this step, per request of `decodes`  } only with
    block_tables:    block ids per request id of all grants                      } `record_positions`
    copied_out, copied_back: (block, slot) and (slot, block) of copies to a second tier and back, in this order and
                     before its tokens are computed; only with `HostCopies`
    """

    __slots__ = (
        "block_tables",
        "chunks",
        "cohort_age",
        "copied_back",
        "copied_out",
        "decode_context",
        "decode_windowed",
        "decodes",
        "draft_depths",
        "group_tokens",
        "index",
        "is_complete",
        "loads",
        "num_accepted",
        "num_accepted_tokens",
        "num_chunk_tokens",
        "num_draft_tokens",
        "num_gaps",
        "num_padding_tokens",
        "num_restored_blocks",
        "num_restored_tokens",
        "num_stalled",
        "num_stored_blocks",
        "num_wasted_tokens",
        "padded",
        "positions",
        "preempted",
        "resumed",
        "samples",
        "singles",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.decodes: list[Request] = []
        self.decode_context = 0
        self.decode_windowed: tuple[int, ...] = ()
        self.draft_depths: list[int] = []
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.padded: tuple[Request, ...] = ()
        self.num_padding_tokens = self.num_wasted_tokens = 0
        self.num_accepted: Sequence[int] = ()
        self.chunks: list[Grant] = []
        self.num_chunk_tokens = 0
        self.num_gaps = 0
        self.num_restored_blocks = 0
        self.num_restored_tokens = 0
        self.num_stalled = 0
        self.num_stored_blocks = 0
        self.group_tokens = 0
        self.cohort_age = 0
        self.samples: list[Request] = []
        self.singles: list[Request] = []
        self.resumed: list[Request] = []
        self.preempted: list[Request] = []
        self.loads: tuple[Request, ...] = ()
        self.is_complete = True
        self.positions: list[int] = []
        self.block_tables: dict[int, list[int]] = {}
        self.copied_out: list[tuple[int, int]] = []
        self.copied_back: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        beside = self.num_draft_tokens + self.num_padding_tokens + self.num_wasted_tokens
        return len(self.decodes) + beside + self.num_chunk_tokens

    @property
    def num_samples(self) -> int:
        """Sequences that get output tokens: one each, and what was right of their drafts.

        Logits are needed for `num_draft_tokens` more.
        """
        return len(self.decodes) + len(self.samples)

    @property
    def is_plain(self) -> bool:
        """Nobody starts, resumes or is preempted, nor is a copy waited for: each of `decodes` follows up its token of
        the step before."""
        others = self.chunks or self.singles or self.resumed or self.num_stalled or self.preempted
        return not (others or self.num_stored_blocks or self.loads)

    @property
    def chunk_lengths(self) -> tuple[tuple[int, int], ...]:
        """(new tokens, tokens already computed) of each chunk."""
        return tuple([(new, computed) for _, computed, new in self.chunks])

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def note_uneven(self, now: int, last_token_at: int, into: list[tuple[int, int]]) -> int:
        """How many of its tokens end no plain gap: first ones, and ones after steps that the request sat out.

        now:  the end of the step, in ticks
        into: gets (ticks, how many times) of the latter; last_token_at: when those who stalled together had their last
        """
        if self.num_stalled:
            into.append((now - last_token_at, self.num_stalled))
        if not (self.resumed or self.singles or self.samples):
            return self.num_stalled
        unevens = self.resumed + self.singles + self.samples
        since = [request.last_token_at for request in unevens if request.last_token_at is not None]
        into += [(now - tick, 1) for tick in since]
        return self.num_stalled + len(unevens)

    def fingerprint(self) -> str:
        """A hash of what the plan decides; equal plans of two runs have equal fingerprints."""
        drafts = [f"drafts {self.draft_depths}"] if self.draft_depths else []
        text = ";".join(
            [f"{self.index}", *(f"{r.request_id}:1" for r in self.decodes), f"context {self.decode_context}", *drafts]
            + [f"{g.request.request_id}:{g.num_computed_tokens}+{g.num_new_tokens}" for g in self.chunks]
            + [f"-{r.request_id}" for r in self.preempted]
        )
        return blake2b(text.encode(), digest_size=8).hexdigest()


class Outcome(NamedTuple):
    """What came of a step: how long it took, in ticks, and the sampled tokens if anyone looks at them.

    num_accepted: for each of the plan's `decodes`, how many of its drafted tokens were right, in a row from the first;
                  needed where the plan has `draft_depths` (see `Speculation` for what pipelined drafts add)
    """

    duration: int
    tokens: Sequence[int] | None = None
    num_accepted: Sequence[int] | None = None


class Backend(Protocol):
    """Executes plans. The simulated one asks a cost model, the executed one runs kernels."""

    def execute(self, plan: StepPlan) -> Outcome:
        """Run `plan` to its end."""
        ...


class StepRecord(NamedTuple):
    """One executed step, or `num_steps` equal decode steps advanced together. Times in ticks.

    `first_duration` is that of the first of them. `num_gaps` inter-token gaps end with each of the steps: tokens that a
    request gets in one step arrive together. `num_drafts` requests drafted `num_draft_tokens` tokens, of which
    `num_accepted_tokens` were right (vLLM's names).
    """

    step: int
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
    num_gaps: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
