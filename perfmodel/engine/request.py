"""`Request`: a few counters, and what follows from them. Times are in ticks of whatever clock drives the engine."""

from collections.abc import Hashable
from enum import Enum


class RequestStatus(Enum):
    """The state that a request is in, from arrival to its last token."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


class TokenTimes:
    """What a `TokenWatch` knows of a request, in ticks.

    first_at:    when its first token came
    pace:        what its reader takes for a token; None: without a reader
    num_tokens:  tokens that are accounted for
    reader_wait: how long its reader has waited in all
    longest_gap: between two of its tokens
    """

    __slots__ = ("first_at", "longest_gap", "num_tokens", "pace", "reader_wait")

    def __init__(self, first_at: int, pace: int | None) -> None:
        self.first_at, self.pace = first_at, pace
        self.num_tokens = self.reader_wait = self.longest_gap = 0


class GroupTables:
    """Blocks of a request where groups of layers keep different rows (`GroupedKVBlocks`).

    firsts: of each group, the first row that it keeps; others: blocks of each group but the first, from there on
    """

    __slots__ = ("firsts", "others")

    def __init__(self, num_groups: int) -> None:
        self.firsts = [0] * num_groups
        self.others: list[list[int]] = [[] for _ in range(num_groups - 1)]


class Request:
    """One request as the engine knows it: counts of tokens, never their text.

    request_id, arrival:   its number; when it arrived, in ticks
    num_prompt_tokens, max_output_tokens: tokens of the prompt; tokens to generate
    priority:              the least goes first, under the policy `priority`
    block_hashes:          identity of the prompt's full KV blocks, in order, and of the answer's where the next prompt
                           of its conversation begins with them; () = a prompt like no other
    contents:              identity of all its full KV blocks as far as the prefix cache knows them: `block_hashes`, and
                           once it was preempted those that are like no other, too
    num_computed_tokens:   tokens whose KV is computed, or will be once the plans made so far have run
    num_promised_tokens:   output tokens that the plans made so far will have sampled
    num_output_tokens:     output tokens that exist (promised minus those still in flight)
    num_source_tokens:     of its prompt before it was shortened, if it was
    admission:             its place in the order of admissions
    num_transferred_tokens: leading tokens whose KV another engine has computed; 0 = this engine computes all. While it
                           waits without blocks, they are to be fetched; with blocks, they have come
    buffer_ids:            blocks beside those that its tokens fill (see `KVBlockManager`)
    tables:                blocks of further groups of layers, where there are any
    session, turn:         whose turn it is in a conversation of several, if it is in one, and which, from 0 (else -1)
    keeps_blocks:          once done, its KV blocks stay its own until `Scheduler.release`: another engine fetches them
    first_token_batch, last_token_batch: sequences that sampled a token in the same step as its first, its last
    token_times: of its tokens, where the engine has a watch

    While it decodes beside others its counters stand still: `DecodeCohort` counts for all.
    """

    __slots__ = (
        "admission",
        "arrival",
        "block_hashes",
        "block_ids",
        "buffer_ids",
        "contents",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "first_token_batch",
        "keeps_blocks",
        "last_step",
        "last_token_at",
        "last_token_batch",
        "max_output_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_output_tokens",
        "num_preemptions",
        "num_promised_tokens",
        "num_prompt_tokens",
        "num_source_tokens",
        "num_transferred_tokens",
        "priority",
        "request_id",
        "session",
        "status",
        "tables",
        "token_times",
        "turn",
    )

    def __init__(
        self,
        request_id: int,
        arrival: int,
        num_prompt_tokens: int,
        max_output_tokens: int,
        block_hashes: tuple[Hashable, ...] = (),
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.num_prompt_tokens = num_prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.block_hashes = self.contents = block_hashes
        self.priority = priority
        self.session: Hashable | None = None
        self.turn = -1
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_promised_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at first admission
        self.num_hashed_blocks = 0  # leading blocks already entered in the prefix cache
        self.num_preemptions = 0
        self.num_transferred_tokens = 0
        self.num_source_tokens = 0
        self.keeps_blocks = False
        self.block_ids: list[int] = []
        self.buffer_ids: list[int] = []
        self.tables: GroupTables | None = None
        self.admission = -1
        self.last_step = -1  # index of the last plan that granted it an output token, -1 since it was preempted
        self.first_scheduled_at: int | None = None
        self.first_token_at: int | None = None
        self.first_token_batch = 0
        self.last_token_batch = 0
        self.last_token_at: int | None = None
        self.finished_at: int | None = None
        self.token_times: TokenTimes | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose values are known once the plans made so far have run."""
        return self.num_prompt_tokens + self.num_promised_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens not yet promised by any plan."""
        return self.max_output_tokens - self.num_promised_tokens

    def afresh(self) -> "Request":
        """The same request as it was before any engine had it."""
        request = Request(
            self.request_id,
            self.arrival,
            self.num_prompt_tokens,
            self.max_output_tokens,
            self.block_hashes,
            self.priority,
        )
        request.num_source_tokens, request.session, request.turn = self.num_source_tokens, self.session, self.turn
        return request

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}/{self.max_output_tokens}, computed={self.num_computed_tokens})"
        )
