"""Data between scheduler and backend: plans, outcomes, step records."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from perfmodel.engine.request import EncoderInput, Request


class Grant(NamedTuple):
    """`num_new_tokens` of `request` behind its `num_computed_tokens` tokens of KV."""

    request: Request
    num_computed_tokens: int
    num_new_tokens: int


@dataclass(slots=True, eq=False, init=False, repr=False)
class StepPlan:
    """Tokens that run in one step; knows no durations.

    Decode, chunked prefill and prefix hit are readings of the grants. One-token grants to fully computed sequences are
    in `decodes`, with their drafts: a cost model needs only their number and summed context."""

    index: int
    decodes: list[Request]
    decode_context: int  # sum over `decodes` of the tokens in their KV, the new one included, drafted ones not
    decode_windowed: tuple[int, ...]  # for each of the config's spans, the sum of min(KV tokens, span)
    # How deep each of `decodes` drafts, in their order (0: it only decodes); empty without drafts. Pipelined drafters
    # work on what comes after all `decodes` of a plan with depths, of 0, too.
    draft_depths: list[int]
    num_draft_tokens: int  # that the step verifies, over all `decodes`: all nodes of a tree (`Speculation`)
    num_accepted_tokens: int  # once applied, how many of these were right
    # Requests that are admitted for one token, which is padded to the length of a verification, and the padding of all,
    # in tokens: computed in vain (vLLM, so that one CUDA graph fits the step).
    padded: tuple[Request, ...]
    num_padding_tokens: int
    # Once applied, tokens of requests that ended with the plan before, after this one was made; these are not among
    # `decodes` any more.
    num_wasted_tokens: int
    num_accepted: Sequence[int]  # once applied, the `Outcome`'s, where there are `draft_depths`
    chunks: list[Grant]  # every other grant
    num_chunk_tokens: int
    num_gaps: int  # once applied, how many requests had their next token right after the last one's step
    num_restored_blocks: int  # KV that comes back from a second tier for this step (`HostBlocks`)
    num_restored_tokens: int
    num_stalled: int  # how many more are as `resumed`, their previous tokens having come in one step
    num_stored_blocks: int  # that go to a second tier before this step, where it waits for them
    group_tokens: int  # of the plans of all ranks that step together with this one; 0: it steps alone
    first_half: int  # its tokens that are computed beside the messages of the others (`BatchShape.first_half`)
    cohort_age: int  # of the `DecodeCohort` with this plan, if it granted its members anything, else 0
    samples: list[Request]  # of `chunks`: have a new output token after this step
    singles: list[Request]  # of `decodes`: end a prompt, or a sequence to recompute
    resumed: list[Request]  # of `decodes`: got no output token in the step before
    preempted: list[Request]  # lost their blocks while this plan was made
    # Requests whose KV begins to come from elsewhere with this plan, into blocks that they have now; or need not come,
    # of those that run, since it is in the prefix cache.
    loads: tuple[Request, ...]
    is_complete: bool  # every running request with tokens to compute has a grant
    # Tokens computed before this step, per request of `decodes`, and block ids per request id of all grants; only with
    # `record_positions`.
    positions: Sequence[int]
    block_tables: dict[int, list[int]]
    # (block, slot) and (slot, block) of copies to a second tier and back, in this order and before its tokens are
    # computed; only with `HostCopies`.
    copied_out: Sequence[tuple[int, int]]
    copied_back: Sequence[tuple[int, int]]
    num_adapters: int  # LoRA adapters that its requests name, and the tokens of these
    num_adapter_tokens: int
    adapter_loads: tuple[int, int] | tuple[()]  # into slots before the step, from the host's memory and from the disk
    encoded: tuple[tuple[Request, EncoderInput], ...]  # images and videos that the step encodes
    num_masks: int  # of the vocabulary, for answers of a required shape (`GrammarMasks`)

    def __init__(self, index: int) -> None:
        self.index, self.is_complete = index, True
        self.decode_context = self.num_draft_tokens = self.num_accepted_tokens = self.num_padding_tokens = 0
        self.num_wasted_tokens = self.num_chunk_tokens = self.num_gaps = self.num_restored_blocks = 0
        self.num_restored_tokens = self.num_stalled = self.num_stored_blocks = self.group_tokens = 0
        self.cohort_age = self.num_adapters = self.num_adapter_tokens = self.num_masks = self.first_half = 0
        self.decode_windowed = self.padded = self.num_accepted = self.loads = self.positions = self.adapter_loads = ()
        self.copied_out = self.copied_back = self.encoded = ()
        self.decodes, self.draft_depths, self.chunks, self.samples = [], [], [], []
        self.singles, self.resumed, self.preempted = [], [], []
        self.block_tables = {}

    @property
    def num_tokens(self) -> int:
        extra = self.num_draft_tokens + self.num_padding_tokens + self.num_wasted_tokens
        return len(self.decodes) + extra + self.num_chunk_tokens

    @property
    def num_samples(self) -> int:
        """Sequences that get output tokens: one each, plus accepted drafts. `num_draft_tokens` more need logits."""
        return len(self.decodes) + len(self.samples)

    @property
    def is_plain(self) -> bool:
        """Nobody starts, resumes, is preempted or awaits a copy: all `decodes` had a token in the step before."""
        others = self.chunks or self.singles or self.resumed or self.num_stalled or self.preempted
        return not (others or self.num_stored_blocks or self.loads or self.adapter_loads)

    @property
    def chunk_lengths(self) -> tuple[tuple[int, int], ...]:
        """(new tokens, tokens already computed) of each chunk."""
        return tuple([(new, computed) for _, computed, new in self.chunks])

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def note_uneven(self, now: int, last_token_at: int, into: list[tuple[int, int]]) -> int:
        """Count tokens that end no plain gap: first ones, and ones after steps that the request sat out.

        now:  end of the step in ticks; last_token_at: previous token time of requests that stalled together
        into: receives (ticks, count) of the gaps"""
        if self.num_stalled:
            into.append((now - last_token_at, self.num_stalled))
        if not (self.resumed or self.singles or self.samples):
            return self.num_stalled
        unevens = self.resumed + self.singles + self.samples
        since = [request.last_token_at for request in unevens if request.last_token_at is not None]
        into += [(now - tick, 1) for tick in since]
        return self.num_stalled + len(unevens)

    def fingerprint(self) -> str:
        """Hash of the plan's decisions, comparable between runs."""
        drafts = [f"drafts {self.draft_depths}"] if self.draft_depths else []
        text = ";".join(
            [f"{self.index}", *(f"{r.request_id}:1" for r in self.decodes), f"context {self.decode_context}", *drafts]
            + [f"{g.request.request_id}:{g.num_computed_tokens}+{g.num_new_tokens}" for g in self.chunks]
            + [f"-{r.request_id}" for r in self.preempted]
        )
        return blake2b(text.encode(), digest_size=8).hexdigest()


class Outcome(NamedTuple):
    """Duration of a step in ticks, and sampled tokens if anyone reads them.

    num_accepted: accepted drafts per decode, required with `draft_depths`; see `Speculation` for pipelined drafters"""

    duration: int
    tokens: Sequence[int] | None = None
    num_accepted: Sequence[int] | None = None


class Backend(Protocol):
    """Executes plans: simulated by a cost model, or on kernels."""

    def execute(self, plan: StepPlan) -> Outcome:
        """Run `plan` to its end."""


class StepRecord(NamedTuple):
    """An executed step, or `num_steps` equal decode steps. Times in ticks."""

    step: int
    num_steps: int
    start: int
    end: int
    first_duration: int  # of the first of the steps
    num_tokens: int
    num_decodes: int
    decode_context: int
    num_chunks: int
    num_running: int
    num_waiting: int
    used_blocks: int
    num_gaps: int  # inter-token gaps that end with each of the steps: tokens that come in one step arrive together
    num_drafts: int = 0  # requests that drafted (vLLM's names)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
