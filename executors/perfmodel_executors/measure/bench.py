"""`StepBench`: any step shape of a model as a function to time, on random tokens and a filled KV cache."""

import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import NamedTuple

from perfmodel.ops.work import BatchShape
from perfmodel_executors.kernels.sampling import DRAW_BITS
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.runner import Passes

_NUM_VARIANTS = 4


class StepGrants(NamedTuple):
    """A step by its grants: KV length of each decode, the new token included; (new tokens, computed, whether its last
    token is sampled) of each prompt chunk; tokens of a decode, drafts included; layers that decodes pass, None: all."""

    contexts: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int, bool], ...] = ()
    queries: int = 1
    layers: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + sum(new for new, _, _ in self.chunks)

    @property
    def num_decode_tokens(self) -> int:
        return len(self.contexts) * self.queries

    def batch_shape(self, spans: tuple[int, ...] = (), num_adapters: int = 0) -> BatchShape:
        """As the cost model sees it; `spans` are the model's `attention_spans`; num_adapters: of which each sequence
        names the next one."""
        drafted = self.num_decode_tokens - len(self.contexts)
        return BatchShape(
            num_tokens=self.num_tokens,
            num_samples=self.num_decode_tokens + sum(is_sampled for _, _, is_sampled in self.chunks),
            prefills=tuple((new, computed) for new, computed, _ in self.chunks),
            num_decodes=len(self.contexts),
            decode_context=sum(self.contexts) + drafted,
            decode_windowed=tuple(sum(min(context, span) for context in self.contexts) + drafted for span in spans),
            decode_tokens=self.num_decode_tokens if drafted else 0,
            num_adapters=min(len(self.contexts) + len(self.chunks), num_adapters),
            adapter_tokens=self.num_tokens if num_adapters else 0,
        )


class StepBench:
    """Builds steps for one runner. All steps share its cache, filled with random keys and values."""

    def __init__(self, runner: Passes, seed: int = 0) -> None:
        self.runner, self.decoder = runner, runner.decoder
        self._rng = random.Random(seed)
        self._filled = 0

    def step(self, shape: StepGrants) -> Callable[[], list[int]]:
        """One step of `shape`. Tokens change with every second call, so that timing covers several routings of experts,
        each once untimed and once timed; the first call is a warm-up."""
        variants = [self._segments(shape) for _ in range(_NUM_VARIANTS)]
        cache, calls = self.runner.cache, count()
        if self.runner.keeps_kv:
            self.runner.reserve_for(variants[0])
        if cache.num_blocks > self._filled:
            for pages in cache.pages:
                pages.fill_normal(self._filled)
            self._filled = cache.num_blocks

        def run() -> list[int]:
            call = next(calls)
            return self.runner.run(variants[call // 2 % _NUM_VARIANTS], is_warm_up=call == 0)

        return run

    def is_graphed(self, shape: StepGrants) -> bool:
        graphs = self.runner.graphs
        return graphs is not None and graphs.can_run(self._segments(shape))

    def _segments(self, shape: StepGrants) -> list[TokenSegment]:
        blocks = count()
        decodes = [self._segment(shape.queries, n - 1, blocks, shape.queries, shape.layers) for n in shape.contexts]
        decodes += [self._segment(new, done, blocks, int(is_sampled)) for new, done, is_sampled in shape.chunks]
        num = self.decoder.num_adapters
        return [own._replace(adapter=i % num) for i, own in enumerate(decodes)] if num else decodes

    def _segment(
        self, new: int, computed: int, blocks: Iterator[int], num_wanted: int, layers: int | None = None
    ) -> TokenSegment:
        table = list(islice(blocks, -(-(new + computed) // self.runner.cache.block_size)))
        vocab = self.decoder.model.vocab_size
        tokens = [self._rng.randrange(vocab) for _ in range(new)]
        is_drawn = self.decoder.chooser.settings is not None
        draws = [self._rng.getrandbits(DRAW_BITS) for _ in range(num_wanted if is_drawn else 0)]
        return TokenSegment(tokens, computed, table, num_wanted > 0, num_wanted > 1, None, layers, draws)
