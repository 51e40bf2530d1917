"""`Request`: counters of one request. Times are in ticks of the driving clock."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class RequestStatus(Enum):
    """Lifecycle of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class TokenTimes:
    """A `TokenWatch`'s record of a request, in ticks."""

    first_at: int  # when its first token came
    pace: int | None  # what its reader takes for a token; None: without a reader
    num_tokens: int = 0  # that are accounted for
    reader_wait: int = 0  # how long its reader has waited in all
    longest_gap: int = 0  # between two of its tokens


@dataclass(slots=True, eq=False)
class GroupTables:
    """Block tables by layer group (`GroupedKVBlocks`).

    firsts: each group's first kept row; blocks: each group's by row, the first's being `Request.block_ids`"""

    firsts: list[int]
    blocks: list[list[int]]


class EncoderInput(NamedTuple):
    """An image or a video of a prompt. offset: prompt tokens before it; content: equal for equal ones; grid: what the
    encoder computes, for who prices it; is_external: another engine has encoded it; size: number of its size in the
    traffic"""

    offset: int
    num_tokens: int
    content: Hashable
    grid: Hashable = None
    is_external: bool = False
    size: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Token counts of one request, never text. `priority`: lowest first.

    In a `DecodeCohort` its counters stand still; the cohort counts for all."""

    request_id: int
    arrival: int
    num_prompt_tokens: int
    max_output_tokens: int  # tokens to generate
    # Identity of the prompt's full KV blocks, in order, and of the answer's where the next prompt of its conversation
    # begins with them; () = a prompt like no other.
    block_hashes: tuple[Hashable, ...] = ()
    priority: int = 0
    session: Hashable | None = None  # whose turn it is in a conversation of several, if it is in one
    turn: int = -1  # and which, from 0
    num_source_tokens: int = 0  # of its prompt before it was shortened, if it was
    status: RequestStatus = RequestStatus.WAITING
    # Identity of all its full KV blocks as far as the prefix cache knows them: `block_hashes`, and once it was
    # preempted those that are like no other, too.
    contents: tuple[Hashable, ...] = field(init=False)
    num_computed_tokens: int = 0  # whose KV is computed, or will be once the plans made so far have run
    num_promised_tokens: int = 0  # output tokens that the plans made so far will have sampled
    num_output_tokens: int = 0  # that exist: promised minus those still in flight
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_hashed_blocks: int = 0  # leading blocks already entered in the prefix cache
    num_preemptions: int = 0
    # Leading tokens whose KV another engine has computed; 0 = this engine computes all. While it waits without blocks,
    # they are to be fetched; with blocks, they have come.
    num_transferred_tokens: int = 0
    keeps_blocks: bool = False  # once done, until `Scheduler.release`: another engine fetches them
    block_ids: list[int] = field(default_factory=list)
    buffer_ids: list[int] = field(default_factory=list)  # beside those that its tokens fill (see `KVBlockManager`)
    tables: GroupTables | None = None  # blocks by group of layers, where there are several
    admission: int = -1  # its place in the order of admissions
    last_step: int = -1  # index of the last plan that granted it an output token, -1 since it was preempted
    first_scheduled_at: int | None = None
    first_token_at: int | None = None
    first_token_batch: int = 0  # sequences that sampled a token in the same step as its first
    last_token_batch: int = 0  # as its last
    last_token_at: int | None = None
    finished_at: int | None = None
    token_times: TokenTimes | None = None  # where the engine has a watch
    adapter: int | None = None  # number of the LoRA adapter that it names; None: the model itself
    encoder_inputs: tuple[EncoderInput, ...] = ()  # in order of their offsets
    num_matched: int = 0  # tokens in a row that its drafter foresaw (`Speculation.depth_by_match`)
    grammar: int | None = None  # number of the shape that its answer must have; None: any text
    awaits_grammar: bool = False  # its grammar is being compiled
    num_offered_blocks: int = 0  # leading blocks of its prompt that a tier has been offered (`TieredBlocks`)
    beam_step: int = -1  # which token of a beam search, whose front end asks for it; -1: it is a client's

    def __post_init__(self) -> None:
        self.contents = self.block_hashes

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known once the plans made so far have run."""
        return self.num_prompt_tokens + self.num_promised_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens not yet promised by a plan."""
        return self.max_output_tokens - self.num_promised_tokens

    def name_blocks(self, num_blocks: int) -> tuple[Hashable, ...]:
        """Contents of its first blocks; those beyond `contents` are unique and get names of their own."""
        own = (("of request", self.request_id, number) for number in range(len(self.contents), num_blocks))
        return (*self.contents[:num_blocks], *own)

    def afresh(self) -> "Request":
        """A copy as before any engine had it."""
        lengths = self.num_prompt_tokens, self.max_output_tokens
        request = Request(self.request_id, self.arrival, *lengths, self.block_hashes, self.priority)
        request.num_source_tokens, request.session, request.turn = self.num_source_tokens, self.session, self.turn
        request.adapter = self.adapter
        request.encoder_inputs, request.grammar = self.encoder_inputs, self.grammar
        return request

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}/{self.max_output_tokens}, computed={self.num_computed_tokens})"
        )


def num_common(known: Sequence[Hashable], contents: Sequence[Hashable], first: int = 0) -> int:
    """Length of the common prefix of `known` and `contents[first:]`."""
    length = min(len(known), len(contents) - first)
    if known[:length] == contents[first : first + length]:
        return length
    return next(i for i in range(length) if known[i] != contents[first + i])
