"""Workloads: traffic as requests in order of arrival, drawn lazily.

Equal seeds give bit-equal requests. Arrivals, inputs, outputs, prefixes and priorities have separate random streams, so
changing one leaves the others unchanged. Think times are drawn by request number: equal on both clocks, with or without
leaps."""

from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from itertools import chain, count, cycle, islice, repeat, tee
from math import ceil
from typing import NamedTuple
from zlib import crc32

import numpy as np

from perfmodel.engine import EncoderInput, Request
from perfmodel.errors import WorkloadError
from perfmodel.sim.clock import TICKS_PER_S, to_ticks
from perfmodel.sim.traffic import distributions
from perfmodel.sim.traffic.conversations import drawn_conversations, recorded_conversations, slowed, turns_of
from perfmodel.sim.traffic.traces import engine_blocks, read_trace
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Traffic

ThinkTime = Callable[[int], int]  # number of the answered request -> ticks until the next is sent
_CHUNK = 1024
_CHUNKS_KEPT = 64  # requests in flight are near each other
_PURPOSE = 0x7468696E6B  # "think": separate from the workload's streams
_IMAGES = 0x696D616765  # "image", likewise


def no_think_time(_: int) -> int:
    """No pause after an answer."""
    return 0


def think_time_of(arrivals: Arrivals, seed: int) -> ThinkTime:
    """Gamma-distributed think times of mean m and standard deviation s: shape (m / s)^2, scale s^2 / m."""
    mean, stddev = arrivals.think_time_s, arrivals.think_time_stddev_s
    if not stddev:
        ticks = to_ticks(mean)
        return no_think_time if not ticks else lambda _: ticks
    shape, scale = (mean / stddev) ** 2, stddev**2 / mean * TICKS_PER_S

    @lru_cache(_CHUNKS_KEPT)
    def chunk(number: int) -> list[int]:
        drawn = np.random.default_rng((_PURPOSE, seed, number)).gamma(shape, scale, _CHUNK)
        ticks: list[int] = np.rint(drawn).astype(np.int64).tolist()
        return ticks

    def draw(request_id: int) -> int:
        number, place = divmod(request_id, _CHUNK)
        return chunk(number)[place]

    return draw


Turn = tuple[int, Request, int]  # ticks after the answer to a turn, the request, and that turn's place in the list
_SAMPLED = 1 << 63  # offset of the content numbers of prompts with several answers
_REPEATED = 1 << 62  # of the contents of blocks of images that repeat
_LONGEST = 1 << 32  # numbers of one prompt's blocks
_ITERATION = 1 << 64  # numbers of one iteration's
_MAX_CLIPPED = 0.5  # of the prompts: beyond that the traffic is misrepresented


class ImagePlan:
    """Images of a scenario's prompts, behind the shared prefix, drawn by a stream of their own; all answers of a prompt
    have the same ones.

    longest, max_tokens, mean_tokens: of an image; of a prompt's images with the tokens that mark their ends
    shares: of each size; grids: of a prompt with images of each size in turn"""

    def __init__(self, scenario: Scenario) -> None:
        images, vision, prefix = scenario.traffic.images, scenario.model.vision, scenario.traffic.prefix
        assert images is not None
        assert vision is not None
        self._count, self._marks, self._seed = images.per_request, vision.rule.num_marks, scenario.seed
        self._samples, self._block_size = scenario.traffic.samples_per_prompt, scenario.engine.kv_block_tokens
        self._kinds = [vision.of_image(size.width, size.height, size.num_frames) for size in images.sizes]
        lengths, shares = [tokens for _, tokens in self._kinds], np.array([size.share for size in images.sizes])
        self._num_distinct = images.num_distinct
        self._known = dict[Hashable, int]()  # contents of blocks of images that repeat
        if images.num_distinct is not None:  # each has its size
            rng = np.random.default_rng((_IMAGES, scenario.seed, images.num_distinct))
            self._sizes = rng.choice(len(lengths), size=images.num_distinct, p=shares / shares.sum()).tolist()
        self.shares, self._begin = shares / shares.sum(), prefix.shared_tokens if prefix is not None else 0
        self.longest = max(lengths)
        self.max_tokens = self._count * (self.longest + self._marks)
        self.mean_tokens = self._count * (float(self.shares @ lengths) + self._marks)
        self.grids = tuple(grid for grid, _ in islice(cycle(self._kinds), self._count))

    def added_to(self, drafts: Iterator["RequestDraft"]) -> Iterator["RequestDraft"]:
        """`drafts` with their images, whose tokens are added to the prompts."""
        rng = np.random.default_rng((_IMAGES, self._seed))
        for number in count():
            answers = list(islice(drafts, self._samples))
            if not answers:
                return
            length = answers[0].num_prompt_tokens
            first = offset = min(self._begin, length - 1)
            images = []
            for content, kind in self._drawn(rng, number):
                grid, tokens = self._kinds[kind]
                images.append(EncoderInput(offset + (self._marks + 1) // 2, tokens, content, grid, size=kind))
                offset += tokens + self._marks
            length, blocks = length + offset - first, answers[0].block_hashes
            if self._num_distinct is not None and (blocks or not first):
                blocks = (*blocks, *self._blocks(images, blocks, offset))
            if self._samples > 1:
                blocks = _shared_blocks(number, blocks, length // self._block_size)
            for draft in answers:
                yield draft._replace(num_prompt_tokens=length, block_hashes=blocks, images=tuple(images))

    def _drawn(self, rng: np.random.Generator, number: int) -> list[tuple[Hashable, int]]:
        """(content, number of its size) of each image of a prompt."""
        if self._num_distinct is not None:
            drawn = rng.integers(self._num_distinct, size=self._count).tolist()
            return [(image, self._sizes[image]) for image in drawn]
        kinds = rng.choice(len(self._kinds), size=self._count, p=self.shares).tolist()
        return [((number, place), kind) for place, kind in enumerate(kinds)]

    def _blocks(self, images: list[EncoderInput], before: tuple[int, ...], end: int) -> Iterator[int]:
        """Contents of the blocks behind `before` up to token `end`, equal where all images so far are."""
        for block in range(len(before), end // self._block_size):
            begun = tuple(item.content for item in images if item.offset < (block + 1) * self._block_size)
            yield self._known.setdefault((before[:1], begun, block), _REPEATED + len(self._known))


class RequestDraft(NamedTuple):
    """A request before it arrives; `arrival_s` is None in a closed loop.

    num_source_tokens: of a compressed prompt, before compression; 0 if not compressed
    session, turn, pause_s: conversation, turn number from 0, seconds since the last answer
    after: number of the turn with that answer, -1 for the conversation's beginning; None: the one before"""

    arrival_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    priority: int = 0
    num_source_tokens: int = 0
    session: Hashable | None = None
    turn: int = -1
    pause_s: float = 0.0
    after: int | None = None
    images: tuple[EncoderInput, ...] = ()

    def compressed(self, ratio: float) -> "RequestDraft":
        """The request with its prompt shortened to `ratio`, keeping the original length."""
        tokens = self.num_prompt_tokens
        hashes = self.block_hashes[: int(len(self.block_hashes) * ratio)]
        return self._replace(num_prompt_tokens=ceil(ratio * tokens), block_hashes=hashes, num_source_tokens=tokens)


_LENGTHS: dict[str, Callable[[RequestDraft], int]] = {
    "longest_prompt_first": lambda draft: draft.num_prompt_tokens,
    "longest_answer_first": lambda draft: draft.num_output_tokens,
}


class Workload:
    """The requests of a scenario. Raises WorkloadError where the engine's max_model_len would clip most prompts.

    concurrency:  users of a closed loop, each with the answers of one prompt in flight, else None
    num_requests: total, where known beforehand
    num_drawn, num_clipped, num_cut, num_refused: requests made so far; prompts clipped to the engine's limit; answers
                  cut at the context's end; requests that the engine refuses
    num_left_out: requests of agents' sessions from a prompt beyond the limit on
    num_resumed, num_resumed_tokens: answers cut in one iteration and resumed in the next; tokens computed again"""

    def __init__(self, scenario: Scenario) -> None:
        traffic, engine = scenario.traffic, scenario.engine
        self.traffic = traffic
        self.max_model_len = engine.max_model_len or scenario.model.max_position_embeddings
        self.block_size = engine.kv_block_tokens
        self.seed = scenario.seed
        is_closed = traffic.arrivals.process == "closed_loop"
        self.concurrency = (traffic.arrivals.concurrency or 1) // traffic.samples_per_prompt if is_closed else None
        self.think_time = think_time_of(traffic.arrivals, self.seed)
        self.num_requests = traffic.num_requests
        adapters = traffic.adapters
        self._adapters = None if adapters is None else distributions.Shares(adapters.chances, self.seed, "adapters")
        shapes = traffic.structured_outputs
        self._shapes = None if shapes is None else distributions.Shares(shapes.chances, self.seed, "shapes")
        if (rollouts := traffic.rollouts) is not None:  # one client, who sends an iteration at a time
            update = to_ticks(rollouts.weight_update_s)
            self.concurrency, self.think_time = 1, lambda _: update
            self.num_requests = (traffic.num_requests or 0) * rollouts.iterations
        self._classes = distributions.class_shares(scenario) if traffic.classes else None
        self._ratio = scenario.prompt_compression.ratio if scenario.prompt_compression is not None else None
        self._gives_text = scenario.model.pooling is None
        self._most_prompt = self.max_model_len - self._gives_text
        self._longest_prompt = int(self._most_prompt / (self._ratio or 1.0))
        self._images = ImagePlan(scenario) if traffic.images is not None else None
        if self._images is not None:
            self._longest_prompt = max(self._longest_prompt - self._images.max_tokens, 1)
        self._is_clipped = traffic.input_tokens is not None and distributions.is_unbounded(traffic.input_tokens)
        self.num_drawn = self.num_clipped = self.num_cut = self.num_refused = 0
        self.num_left_out = self.num_resumed = self.num_resumed_tokens = 0
        lengths = traffic.input_tokens if traffic.trace is None else None
        share = distributions.share_above(lengths, self._longest_prompt) if lengths is not None else 0.0
        if lengths is not None and share > _MAX_CLIPPED:
            raise WorkloadError(
                f"engine.max_model_len={self.max_model_len} would clip {share:.0%} of the prompts "
                f"({lengths.distribution}, mean {lengths.mean:g} tokens); raise it, or shorten traffic.input_tokens"
            )

    def requests(self) -> Iterator[Request]:
        """Requests in order of arrival, times in ticks; in a closed loop arrival is 0 until sent.

        Includes trace prompts beyond max_model_len for the engine to refuse (`refuses`). Raises WorkloadError for one
        that the scenario itself asks for."""
        length, drafts = _LENGTHS.get(self.traffic.arrivals.order), self.drafts()
        for number, draft in enumerate(drafts if length is None else sorted(drafts, key=length, reverse=True)):
            yield self._request(number, draft)

    def drafts(self) -> Iterator[RequestDraft]:
        """Requests as drawn, before engine limits; turns conversation by conversation."""
        if self.traffic.has_conversations:
            return chain.from_iterable(self._turns())
        return islice(self._singles(), self.traffic.num_requests)

    def _singles(self) -> Iterator[RequestDraft]:
        drafts = self._traced() if self.traffic.trace is not None else self._drawn()
        drafts = self._images.added_to(drafts) if self._images is not None else drafts
        ratio = self._ratio
        return drafts if ratio is None else (draft.compressed(ratio) for draft in drafts)

    def conversations(self) -> Iterator[list[Turn]]:
        """Turns by conversation in order of arrival, with ticks since the last answer; later turns arrive when sent."""
        number = 0
        for drafts in self._iterations() if self.traffic.rollouts is not None else self._turns():
            turns = []
            for place, draft in enumerate(drafts):
                after = place - 1 if draft.after is None else draft.after
                turns.append((to_ticks(draft.pause_s), self._request(number, draft), after))
                number += 1
            yield turns

    def _request(self, number: int, draft: RequestDraft) -> Request:
        limit = self.max_model_len
        if self.refuses(draft) and self.traffic.trace is None:
            raise WorkloadError(
                f"request {number} has a prompt of {draft.num_prompt_tokens} tokens, but max_model_len={limit} leaves "
                f"room for at most {self._most_prompt}{' and one output token' if self._gives_text else ''}; raise "
                f"engine.max_model_len or shorten the prompt"
            )
        # As in vLLM, an answer ends where the context is full.
        outputs = max(min(draft.num_output_tokens, limit - draft.num_prompt_tokens), 1) if self._gives_text else 1
        self.num_drawn += 1
        if self.refuses(draft):
            self.num_refused += 1
        elif outputs < draft.num_output_tokens and self._gives_text:
            self.num_cut += 1
        length = draft.num_source_tokens or draft.num_prompt_tokens
        self.num_clipped += self._is_clipped and length >= self._longest_prompt
        arrival = round((draft.arrival_s or 0.0) * TICKS_PER_S)
        adapter = None
        if self._adapters is not None and self.traffic.adapters is not None:
            adapter = self._adapters.of(number if draft.session is None else crc32(repr(draft.session).encode()))
            adapter = adapter if adapter < self.traffic.adapters.count else None
        contents = draft.block_hashes if adapter is None else tuple([(adapter, block) for block in draft.block_hashes])
        request = Request(number, arrival, draft.num_prompt_tokens, outputs, contents, draft.priority)
        request.adapter = adapter
        if self._shapes is not None and self.traffic.structured_outputs is not None:
            grammar = self._shapes.of(number)
            request.grammar = grammar if grammar < self.traffic.structured_outputs.count else None
        if self._classes is not None:
            request.priority = self.traffic.classes[self._classes.of(number)].priority
        request.num_source_tokens = draft.num_source_tokens
        request.session, request.turn = draft.session, draft.turn
        request.encoder_inputs = draft.images
        return request

    def refuses(self, request: Request | RequestDraft) -> bool:
        """Whether the prompt leaves no room for an answer."""
        return request.num_prompt_tokens > self._most_prompt

    def _streams(self, count: int = 5) -> list[np.random.Generator]:
        return [np.random.default_rng(child) for child in np.random.SeedSequence(self.seed).spawn(count)]

    def _turns(self) -> Iterator[list[RequestDraft]]:
        """Turns of each conversation within the context, up to the number of requests."""
        left, limit, traffic = self.num_requests, self.max_model_len, self.traffic
        *streams, for_priorities, for_pauses = self._streams(6)
        priorities = _priorities(traffic, for_priorities)
        system = traffic.conversations.system_tokens if traffic.conversations is not None else 0
        read = drawn_conversations if traffic.trace is None else recorded_conversations
        conversations = read(traffic, [*streams, for_pauses], max(self._longest_prompt - system, 1))
        for number, conversation in enumerate(conversations):
            turns = list(turns_of(conversation, number, self.block_size, limit))
            if conversation.hashes is not None:
                self.num_left_out += len(conversation.turns) - len(turns)
            else:
                self.num_refused += not turns
            turns = turns[:left]
            if not turns and traffic.trace is None:
                needed = conversation.num_system_tokens + conversation.turns[0].num_new_tokens
                raise WorkloadError(
                    f"conversation {number} begins with {needed} tokens, but max_model_len={limit} leaves room for at "
                    f"most {limit - 1} and one output token; raise engine.max_model_len or shorten the prompt"
                )
            left = None if left is None else left - len(turns)
            drafts = [
                RequestDraft(conversation.arrival_s, *prompt[:3], next(priorities), 0, number, place, *prompt[3:])
                for place, prompt in enumerate(turns)
            ]
            if drafts:
                yield drafts
            if left == 0:
                return

    def _drawn(self) -> Iterator[RequestDraft]:
        traffic = self.traffic
        for_arrivals, for_inputs, for_outputs, for_prefixes, for_priorities = self._streams()
        assert traffic.input_tokens is not None
        assert traffic.output_tokens is not None
        samples, arrivals = traffic.samples_per_prompt, traffic.arrivals
        if samples > 1:
            arrivals = slowed(arrivals, samples)
        times = distributions.arrival_times(arrivals, traffic.duration_s, for_arrivals)
        inputs = distributions.draw_lengths(traffic.input_tokens, for_inputs, self._longest_prompt)
        outputs = distributions.draw_lengths(traffic.output_tokens, for_outputs, self.max_model_len)
        prompts = distributions.prefix_plan(traffic.prefix, inputs, for_prefixes, self.block_size, self._longest_prompt)
        priorities = _priorities(traffic, for_priorities)
        if samples == 1:
            for time, (length, hashes), output, priority in zip(times, prompts, outputs, priorities, strict=False):
                yield RequestDraft(time, length, output, hashes, priority)
            return
        for number, (time, (length, hashes), priority) in enumerate(zip(times, prompts, priorities, strict=False)):
            blocks = _shared_blocks(number, hashes, min(length, self._longest_prompt) // self.block_size)
            for output in islice(outputs, samples):  # requests of their own, as vLLM's ParentRequest makes them
                yield RequestDraft(time, length, output, blocks, priority, 0, number, after=-1)

    def _iterations(self) -> Iterator[list[RequestDraft]]:
        """Answers by iteration of `traffic.rollouts`: those cut in the one before, and `num_requests` new ones. Nothing
        cached outlives an iteration, as the weights change."""
        spec, drafts = self.traffic.rollouts, self._singles()
        assert spec is not None
        most, length = spec.max_answer_tokens or self.max_model_len, _LENGTHS.get(self.traffic.arrivals.order)
        cut: list[RequestDraft] = []
        for iteration in range(spec.iterations):
            self.num_resumed += len(cut)
            self.num_resumed_tokens += sum(draft.num_prompt_tokens for draft in cut)
            waiting, cut, answers = cut, [], []
            for draft in chain(waiting, islice(drafts, self.traffic.num_requests)):
                prompt, outputs, blocks = draft.num_prompt_tokens + most, draft.num_output_tokens, draft.block_hashes
                if outputs > most and prompt < self.max_model_len:
                    cut.append(draft._replace(num_prompt_tokens=prompt, num_output_tokens=outputs - most))
                    outputs = most
                blocks = tuple(block + iteration * _ITERATION for block in blocks)
                answers.append(draft._replace(num_output_tokens=outputs, block_hashes=blocks, after=-1))
            yield answers if length is None else sorted(answers, key=length, reverse=True)

    def _traced(self) -> Iterator[RequestDraft]:
        traffic = self.traffic
        assert traffic.trace is not None
        rows = read_trace(traffic.trace.path, traffic.trace.format)
        speedup = traffic.trace.speedup
        follows_trace = traffic.arrivals.process == "trace" or "arrivals" not in traffic.model_fields_set
        streams = self._streams()
        times = distributions.arrival_times(traffic.arrivals, traffic.duration_s, streams[0])
        # Prompts of a trace that does not say what they share begin as `prefix` has it.
        rows, again = tee(rows)
        lengths = (row.num_prompt_tokens for row in again)
        shared = distributions.prefix_plan(traffic.prefix, lengths, streams[3], self.block_size, self._longest_prompt)
        priorities = _priorities(traffic, streams[4])
        for row, (_, beginning), time, priority in zip(rows, shared, times, priorities, strict=False):
            if traffic.prefix is not None and row.block_hashes:
                raise WorkloadError(
                    f"{traffic.trace.path}: says which blocks prompts share, beside traffic.prefix; leave one out"
                )
            arrival = row.arrival_s / speedup if follows_trace else time
            if traffic.duration_s is not None and arrival is not None and arrival > traffic.duration_s:
                break
            blocks = beginning or engine_blocks(row[1], row.block_hashes, row.hash_block_size, self.block_size)
            yield RequestDraft(arrival, *row[1:3], blocks, priority, 0, row.session)


def _shared_blocks(number: int, blocks: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
    """Contents of the `num_blocks` blocks of prompt `number`, which has several answers and begins with `blocks`."""
    first = _SAMPLED + number * _LONGEST
    return (*blocks, *range(first + len(blocks), first + num_blocks))


def _priorities(traffic: Traffic, rng: np.random.Generator) -> Iterator[int]:
    if not traffic.priorities:
        yield from repeat(0)
    while True:
        yield from rng.choice(np.array(traffic.priorities), size=1024).tolist()
