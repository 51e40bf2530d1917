"""Pipelined drafting (Liu et al. 2025, PEARL): a draft model that goes on while the model verifies, in its own thread.
In each step the drafter begins behind a sequence's draft, or behind its newest token where it has none: it guesses
the token that the model will add, and drafts k more: the next draft, if the model agrees with all of them. Its KV
cache is on the block tables of the model's."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from perfmodel_executors.models.batch import TokenSegment, slot
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting, DraftShape, Proposer
from perfmodel_executors.speculation.speculator import Speculator, Verified


class DraftedAhead(NamedTuple):
    """What the drafter found behind each draft, the guess of the model's token first, and its thread's CPU time."""

    tokens: list[list[int]]
    cpu_ns: int


class _Beyond(NamedTuple):
    """Keys and values of a sequence's tokens from `first` on, in the drafter's own slots, until step `turn`."""

    turn: int
    first: int
    slots: list[int]


class PipelinedProposer(Proposer):
    """Drafts `depth` tokens of up to `max_seqs` sequences with `runner`."""

    def __init__(self, runner: StepRunner, depth: int, max_seqs: int) -> None:
        self.runner = self._drafter = runner
        self.depth = depth
        self._per_sequence = -(-(depth + 1) // runner.cache.block_size) + 1  # own blocks
        self._max_seqs = max_seqs
        self._own_blocks = 2 * self._per_sequence * max_seqs  # of this step and of the one before
        self._turn = 0  # steps that are settled
        self._longest = runner.decoder.model.max_position_embeddings
        self._drafts: dict[int, list[int]] = {}  # of the next step
        self._computed: dict[int, int] = {}  # tokens of each sequence in the drafter's cache; else all but the newest
        self._beyond: dict[int, _Beyond] = {}
        self._thread = ThreadPoolExecutor(1, initializer=partial(torch.set_num_threads, 1))

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        highest = max((max(table) for table in block_tables if table), default=0)
        self._drafter.cache.reserve(self._own_blocks + highest + 1)

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        return [self._drafts.get(sequence.key, [])[: sequence.depth] for sequence in drafting]

    def go_on(
        self, drafting: Sequence[Drafting], drafts: Sequence[Sequence[int]], chunks: Sequence[TokenSegment]
    ) -> "Future[DraftedAhead]":
        """Begin to draft behind `drafts`, beside the caller; prompts are computed with the first pass."""
        return self._thread.submit(self._go_on, drafting, drafts, chunks)

    def finalize(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        """The step is over; `keep` follows for each sequence."""
        self._turn += 1

    def keep(self, index: int, drafting: Drafting, num_accepted: int, ahead: Sequence[int] | None) -> None:
        """So much of the draft of the step's sequence `index` was right. ahead: the draft of its next step, where the
        guess was right, too."""
        known, size = len(drafting.tokens) + num_accepted, self._drafter.cache.block_size
        capacity = len(drafting.block_table) * size
        self._drafts.pop(drafting.key, None)
        self._beyond.pop(drafting.key, None)
        if ahead is not None:
            self._drafts[drafting.key] = list(ahead)
            known += len(ahead)  # the guess, and all but the last of them
        if known > capacity:
            own = self._own(index, self._turn - 1)
            slots = [slot(own, place, size) for place in range(known - capacity)]
            self._beyond[drafting.key] = _Beyond(self._turn, capacity, slots)
        self._computed[drafting.key] = known

    def release(self, key: int) -> None:
        self._drafts.pop(key, None)
        self._computed.pop(key, None)
        self._beyond.pop(key, None)

    def firsts(self, drafting: Sequence[Drafting], drafts: Sequence[Sequence[int]]) -> list[TokenSegment]:
        return [self._first(i, *pair) for i, pair in enumerate(zip(drafting, drafts, strict=True))]

    def _go_on(
        self, drafting: Sequence[Drafting], drafts: Sequence[Sequence[int]], chunks: Sequence[TokenSegment]
    ) -> DraftedAhead:
        begin, size = time.thread_time_ns(), self._drafter.cache.block_size
        segments = self.firsts(drafting, drafts)
        # What the last step has left behind sequences' last blocks goes to where it belongs.
        moves: list[tuple[int, int]] = []
        for sequence, segment in zip(drafting, segments, strict=True):
            beyond = self._beyond.get(sequence.key)
            if beyond is not None and beyond.turn == self._turn:
                sources = beyond.slots[: max(0, segment.num_computed - beyond.first)]
                places = (slot(segment.block_table, beyond.first + i, size) for i in range(len(sources)))
                moves += zip(sources, places, strict=True)
        if moves:
            self._drafter.cache.move(moves)
        prompts = [
            chunk._replace(block_table=self._shifted(chunk.block_table), is_sampled=False, draws=()) for chunk in chunks
        ]
        result: list[list[int]] = [[] for _ in drafting]
        active = [i for i, sequence in enumerate(drafting) if sequence.ahead]
        if segments or prompts:
            unasked = [
                s if sequence.ahead else s._replace(is_sampled=False)
                for s, sequence in zip(segments, drafting, strict=True)
            ]
            for i, token in zip(active, self._drafter.run([*unasked, *prompts]), strict=True):
                result[i].append(token)
        for count in range(1, max((sequence.ahead for sequence in drafting), default=0)):
            ends = [segment.num_computed + len(segment.tokens) + count - 1 for segment in segments]
            active = [i for i in active if drafting[i].ahead > count and ends[i] < self._longest]
            behind = [TokenSegment([result[i][-1]], ends[i], segments[i].block_table) for i in active]
            for i, token in zip(active, self._drafter.run(behind) if behind else [], strict=True):
                result[i].append(token)
        return DraftedAhead(result, time.thread_time_ns() - begin)

    def _first(self, index: int, drafting: Drafting, draft: Sequence[int]) -> TokenSegment:
        """What the drafter has not computed of a sequence and its draft; at least the last token."""
        text = [*drafting.tokens, *draft]
        start = min(self._computed.get(drafting.key, drafting.num_computed), len(text) - 1)
        beyond = self._beyond.get(drafting.key)
        if beyond is not None and beyond.turn != self._turn:  # left out of a step: others have written there
            start = min(start, beyond.first)
        table = [*self._shifted(drafting.block_table), *self._own(index, self._turn)]
        return TokenSegment(text[start:], start, table)

    def _own(self, index: int, turn: int) -> range:
        first = (turn % 2 * self._max_seqs + index) * self._per_sequence
        return range(first, first + self._per_sequence)

    def _shifted(self, block_table: Sequence[int]) -> list[int]:
        return [self._own_blocks + block for block in block_table]


class PipelinedSpeculator(Speculator):
    """A drafter runs while the model does. A step takes as long as the longer of both threads, by their CPU
    times: on a shared machine the wall's time is that of the neighbours."""

    proposer: PipelinedProposer

    def __init__(self, runner: StepRunner, proposer: PipelinedProposer, tree: DraftShape, method: str = "") -> None:
        super().__init__(runner, proposer, tree, method)
        self.ahead = proposer.depth + 1  # a guess of the model's own token, and the next draft
        self._ahead: list[list[int]] = []

    def shape(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> tuple[int, ...]:
        firsts = self.proposer.firsts(drafting, self.proposer.propose(drafting, chunks))
        return (*super().shape(drafting, chunks), -1, *sorted(len(first.tokens) for first in firsts))

    def run(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment], is_warm_up: bool = False) -> Verified:
        drafts = self.proposer.propose(drafting, chunks)
        going_on = self.proposer.go_on(drafting, drafts, chunks)
        begin = time.thread_time_ns()
        verified = super().run(drafting, chunks, is_warm_up)
        verifying_ns = time.thread_time_ns() - begin
        self._ahead, drafting_ns = going_on.result()
        guessed = [
            tokens[-1] == ahead[0] if ahead and len(path) == len(draft) else None
            for tokens, path, draft, ahead in zip(verified.tokens, verified.paths, drafts, self._ahead, strict=False)
        ]
        return verified._replace(guessed=guessed, waited_ns=max(0, drafting_ns - verifying_ns))

    def finalize(self, drafting: Sequence[Drafting], verified: Verified) -> None:
        super().finalize(drafting, verified)
        outcomes = zip(drafting, verified.paths, verified.guessed, self._ahead, strict=True)
        for index, (sequence, path, guess, ahead) in enumerate(outcomes):
            self.proposer.keep(index, sequence, len(path), ahead[1:] if guess else None)
