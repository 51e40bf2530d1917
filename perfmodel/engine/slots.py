"""Slots of llama-server (tools/server, build 11434), each with the KV of its last request.

A request takes a free slot before a step is planned, regardless of the budget: the one that holds most of its prompt,
if more than `least_similarity` of it, else the one free for longest. It computes what the slot lacks. A step grants
decodes first, then prompts in slot order. Slots are preallocated, so nothing is preempted.

`saves_prompts` (--cache-ram): a host-memory cache of prompts from free slots. A prompt is saved when another is about
to take its slot and whenever a request starts (--cache-idle-slots); it returns whole for a request that shares more
with it than with its slot. `is_unified` (--kv-unified): one KV pool, so saved free slots are emptied. The cache is
unlimited here."""

from bisect import insort
from collections.abc import Hashable
from operator import attrgetter

from perfmodel.engine.config import SchedulerConfig, Slots
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request, num_common
from perfmodel.engine.running import OnPreempted, RunningRequests

_SLOT = attrgetter("admission")
_MIN_KEPT = 0.25  # least share of a request that a restored prompt must cover
_MAX_LOST = 0.5  # a slot's prompt is saved before a request that keeps less of it

Contents = tuple[Hashable, ...]  # identity of full KV blocks from the first on


class SlottedRequests(RunningRequests):
    """`RunningRequests` for a `config` with `slots`: a request's `admission` is its slot number."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlockManager, on_preempted: OnPreempted) -> None:
        super().__init__(config, blocks, on_preempted)
        assert config.slots is not None
        self._slots: Slots = config.slots
        self._held: list[Contents] = [()] * config.max_num_seqs  # KV contents of each slot
        self._freed_at = [-1] * config.max_num_seqs  # order of release; -1: never used
        self._free = set(range(config.max_num_seqs))
        self._num_freed = 0
        self._saved: list[Contents] = []  # the second cache, oldest first

    def take_slot(self, request: Request) -> int:
        """Give `request`, whose blocks it has, a free slot; return its cached prompt tokens."""
        number = self._choose(request.contents, request.num_prompt_tokens)
        num_blocks = num_common(self._held[number], request.contents) if self._slots.reuses else 0
        self._free.remove(number)
        if self._slots.saves_prompts:
            for free in sorted(self._free):
                self._save(self._held[free])
                if self._slots.is_unified:
                    self._held[free] = ()
        request.admission = number
        request.num_computed_tokens = min(num_blocks * self._blocks.block_size, request.num_prompt_tokens - 1)
        self.requests[request] = None
        insort(self._prompts, request, key=_SLOT)
        return request.num_computed_tokens

    def _choose(self, contents: Contents, num_tokens: int) -> int:
        """Free slot for a prompt of `num_tokens` with `contents`, and the contents to keep."""
        best, size = -1, self._blocks.block_size
        most: float = self._slots.least_similarity * num_tokens
        for number in sorted(self._free):
            num_shared = num_common(self._held[number], contents) * size
            if num_shared > most:
                best, most = number, float(num_shared)
        is_similar = best >= 0
        if not is_similar:  # the last never used one
            best = min(self._free, key=lambda number: (self._freed_at[number], -number))
        if self._slots.saves_prompts and not (is_similar and most >= _MAX_LOST * len(self._held[best]) * size):
            self._save(self._held[best])
            self._load(best, contents)
        return best

    def admit(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        num_computed = request.num_computed_tokens
        self.take_slot(request)
        request.num_computed_tokens = num_computed  # of KV from elsewhere

    def leave(self, request: Request) -> None:
        """Free the slot of `request`, keeping its computed KV."""
        super().leave(request)
        number = request.admission
        self._held[number] = request.name_blocks(request.num_computed_tokens // self._blocks.block_size)
        self._free.add(number)
        self._freed_at[number] = self._num_freed
        self._num_freed += 1

    def _save(self, held: Contents) -> None:
        """Save a slot's prompt, replacing saved prefixes of it; not if it is a prefix of one."""
        if not held or any(num_common(saved, held) == len(held) for saved in self._saved):
            return
        self._saved = [saved for saved in self._saved if num_common(saved, held) < len(saved)]
        self._saved.append(held)

    def _load(self, number: int, contents: Contents) -> None:
        """Restore the saved prompt that shares more with `contents` than the slot does, if any."""
        held, best = self._held[number], -1
        most = num_common(held, contents)
        most_kept = most / len(held) if held else -1.0
        for place, saved in enumerate(self._saved):
            num_shared = num_common(saved, contents)
            kept = num_shared / len(saved)
            if kept >= _MIN_KEPT and kept > most_kept and num_shared > most:
                best, most, most_kept = place, num_shared, kept
        if best >= 0:
            self._held[number] = self._saved.pop(best)

    def _chunks(self, budget: int, decodes: bool) -> list[tuple[Request, int]]:
        left = max(budget - len(self.cohort.joined), 0)
        chunks: list[tuple[Request, int]] = []
        for request in self._prompts:
            num_tokens = min(self.chunk(request.num_tokens - request.num_computed_tokens, left), left)
            left -= num_tokens
            chunks.append((request, num_tokens))
        return chunks
