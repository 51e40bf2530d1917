"""KV tiers on the calendar: stores behind the hosts' memory, and loads into a device's blocks beside its steps.

A store reads B bytes for one of n readers at a time in

    t = latency + n B / W,          W: its bandwidth for reads

in batches of 128 blocks; it writes one batch after another. An engine loads over its devices' links, one request after
another. Replicas find a block in a shared store once it is written. Blocks of all devices of an engine count, also
where these are copies (latents).
Source: vLLM 0.30: v1/kv_offload/cpu/gpu_worker.py (one load after another), tiering/manager.py (all tiers are written);
SGLang: managers/cache_controller.py (storage_batch_size)."""

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from simpy import Interrupt
from simpy.events import Event

from perfmodel.cost import StepCosts
from perfmodel.cost.memory.offload import recompute_s
from perfmodel.engine import Request
from perfmodel.engine.tiered_blocks import Arrive, Stop, TieredBlocks
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.kv_transfer import Fabric
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.replica.serving import SecondTier
from perfmodel.specs.engine.offload import SecondaryTier
from perfmodel.specs.scenario import Scenario

_BATCH = 128  # blocks that are read or written together (HiCache's storage_batch_size)
Seconds = Callable[[int], float]


class KvStore:
    """Blocks of `block_bytes` in a store like `spec`, the least recently used evicted first; `part`: of it is here."""

    def __init__(self, env: TickEnvironment, spec: SecondaryTier, block_bytes: float, part: float = 1.0) -> None:
        self.name, self.block_bytes, self._env, self._latency = spec.name, block_bytes, env, to_ticks(spec.latency_s)
        self._capacity = None if spec.capacity_bytes is None else int(part * spec.capacity_bytes // block_bytes)
        self._read_rate = part * spec.read_bandwidth_bytes_per_s
        self._write_rate = part * (spec.write_bandwidth_bytes_per_s or spec.read_bandwidth_bytes_per_s)
        self._reads, self._writes_free_at = Fabric(env, self._read_rate), 0
        self.contents: OrderedDict[Hashable, None] = OrderedDict()
        self._writing: set[Hashable] = set()
        self.num_written = self.num_read = self.num_evicted = self.num_readers = 0

    def expected_s(self, num_blocks: int) -> float:
        """Time to read `num_blocks` beside those who read now."""
        bytes_per_s = self._read_rate / (1 + self.num_readers)
        return -(-num_blocks // _BATCH) * self._latency / TICKS_PER_S + num_blocks * self.block_bytes / bytes_per_s

    def put(self, contents: Sequence[Hashable]) -> None:
        """Write what is not here."""
        for content in contents:
            if content in self.contents:
                self.contents.move_to_end(content)
        new = [content for content in contents if content not in self.contents and content not in self._writing]
        if new:
            self._writing.update(new)
            self._env.process(self._write(new))

    def _write(self, contents: Sequence[Hashable]) -> Generator[Event, None, None]:
        for batch in _batches(contents):
            begin = max(self._env.ticks, self._writes_free_at)
            self._writes_free_at = begin + self._latency + to_ticks(len(batch) * self.block_bytes / self._write_rate)
            yield self._env.timeout(self._writes_free_at - self._env.ticks)
            self._writing.difference_update(batch)
            self.contents.update(dict.fromkeys(batch))
            self.num_written += len(batch)
        while self._capacity is not None and len(self.contents) > self._capacity:
            self.contents.popitem(last=False)
            self.num_evicted += 1

    def read(self, contents: Sequence[Hashable], arrive: Arrive) -> Generator[Event, None, None]:
        """Read `contents`, which are here."""
        self.num_readers += 1
        try:
            for batch in _batches(contents):
                for content in batch:
                    if content in self.contents:
                        self.contents.move_to_end(content)
                yield self._env.timeout(self._latency)
                moved = self._reads.move(len(batch) * self.block_bytes, self._read_rate)
                try:
                    yield moved
                except Interrupt:
                    self._reads.stop(moved)
                    raise
                self.num_read += len(batch)
                arrive(batch)
        finally:
            self.num_readers -= 1


class EngineTiers:
    """One engine's way to `stores` (`BlockStores`) and over its devices' link; `rule`: when stores are read.

    tier: the host's; computed_s: what computing so many tokens takes"""

    _rank: EngineRank

    def __init__(
        self, env: TickEnvironment, stores: Sequence[KvStore], tier: SecondTier, rule: str, computed_s: Seconds
    ) -> None:
        self._env, self.stores, self._cost, self._rule, self._computed_s = env, stores, tier.cost, rule, computed_s
        self._link_free_at = self.num_loads = self.load_ticks = 0

    def serve(self, rank: EngineRank) -> None:
        """Bring KV to the engine of `rank`, and tell it."""
        self._rank, rank.loop.on_load = rank, self.load

    def load(self, request: Request) -> None:
        """Copy to the device what `request` has blocks for and the prefix cache lacks."""
        size, now = self._cost.block_size, self._env.ticks
        num_tokens = request.num_computed_tokens - request.num_hashed_blocks * size
        begin = max(now, self._link_free_at)
        self._link_free_at = begin + to_ticks(self._cost.alone_s(num_tokens, -(-num_tokens // size)))
        Alarm(self._env, self._link_free_at - now, partial(self._end_load, request, now), ARRIVAL_PRIORITY)

    def _end_load(self, request: Request, asked_at: int, _: Event) -> None:
        if self._rank.loop.scheduler.detached.get(request.request_id) is request:  # else it was aborted
            self.num_loads += 1
            self.load_ticks += self._env.ticks - asked_at
            self._rank.finish_load(request)

    def holds(self, content: Hashable) -> bool:
        return any(content in store.contents for store in self.stores)

    def put(self, contents: Sequence[Hashable]) -> None:
        for store in self.stores:
            store.put(contents)

    def fetch(self, contents: Sequence[Hashable], arrive: Arrive, done: Stop) -> Stop | None:
        parts: dict[KvStore, list[Hashable]] = {}
        for content in contents:
            store = next(store for store in self.stores if content in store.contents)
            parts.setdefault(store, []).append(content)
        if not self._is_worthwhile({store: len(part) for store, part in parts.items()}):
            return None
        fetch = self._env.process(self._fetch(parts, arrive, done))
        return lambda: fetch.interrupt() if fetch.is_alive else None

    def _is_worthwhile(self, num_blocks: dict[KvStore, int]) -> bool:
        if self._rule != "faster":
            return self._rule == "restore"
        count, size = sum(num_blocks.values()), self._cost.block_size
        tokens = count * size
        at_least = size << (count.bit_length() - 1)
        whole = sum(store.expected_s(number) for store, number in num_blocks.items())
        return whole + self._cost.alone_s(tokens, count) < self._computed_s(at_least) * tokens / at_least

    def _fetch(self, parts: dict[KvStore, list[Hashable]], arrive: Arrive, done: Stop) -> Generator[Event, Any, None]:
        def arrived(batch: Sequence[Hashable]) -> None:
            arrive(batch)
            self._rank.retry_waiting()

        try:
            for store, contents in parts.items():
                yield from store.read(contents, arrived)
        except Interrupt:
            return
        done()
        self._rank.retry_waiting()


def _batches(contents: Sequence[Hashable]) -> Iterator[Sequence[Hashable]]:
    return (contents[first : first + _BATCH] for first in range(0, len(contents), _BATCH))


class ClusterTiers:
    """Tiers of all engines of a cluster; `part`: the slice of it that is simulated."""

    def __init__(self, env: TickEnvironment, part: float) -> None:
        self._env, self._part = env, part
        self._shared: dict[str, KvStore] = {}
        self.engines: list[EngineTiers] = []

    def summary(self) -> dict[str, Any]:
        """Loads beside steps, with the mean time from the wish to the last byte; what stores of a name did, summed."""
        num_loads = sum([engine.num_loads for engine in self.engines])
        load_ticks = sum([engine.load_ticks for engine in self.engines])
        stores: dict[str, list[KvStore]] = {}
        for store in dict.fromkeys(store for engine in self.engines for store in engine.stores):
            stores.setdefault(store.name, []).append(store)
        return {
            "loads": num_loads,
            "mean_load_ms": load_ticks / 1e9 / max(num_loads, 1),
            "stores": {
                name: {
                    "blocks": sum([len(store.contents) for store in alike]),
                    "written_blocks": sum([store.num_written for store in alike]),
                    "read_blocks": sum([store.num_read for store in alike]),
                    "evicted_blocks": sum([store.num_evicted for store in alike]),
                }
                for name, alike in stores.items()
            },
        }

    def of_engine(self, own: Scenario, tier: SecondTier, costs: StepCosts) -> tuple[EngineTiers, TieredBlocks]:
        """Tiers of one more engine of the pool's scenario `own`, which are to `serve` it, and its host's blocks."""
        offload, engine = own.engine.kv_offload, own.engine
        assert offload is not None
        block_bytes = tier.cost.block_bytes * engine.tensor_parallel_size * engine.pipeline_parallel_size
        stores = []
        for spec in offload.secondary_tiers:
            if not spec.shared:
                stores.append(KvStore(self._env, spec, block_bytes))
                continue
            if spec.name not in self._shared:
                self._shared[spec.name] = KvStore(self._env, spec, block_bytes, self._part)
            stores.append(self._shared[spec.name])
        computed_s = cache(partial(recompute_s, costs.graph, costs.timer))
        tiers = EngineTiers(self._env, stores, tier, offload.rule, computed_s)
        self.engines.append(tiers)
        blocks = TieredBlocks(
            tier.capacity,
            engine.kv_block_tokens,
            tier.least_tokens,
            tier.cost.is_awaited,
            is_async=offload.load == "async",
            store_after=offload.store_after,
            stores=tiers if stores else None,
            prefetches=offload.storage_prefetch_policy is not None,
            waits=offload.storage_prefetch_policy != "best_effort",
            is_shared=engine.enable_prefix_caching,
        )
        return tiers, blocks
