"""KV transfers from prefill to decode replicas: duration and queueing.

Every device has its own link. A decode device receives its part of each token (latent KV is replicated over a
tensor-parallel group, so every device receives all of it); prefill devices share the sending evenly. With b bytes per
token on one of n decode devices, m prefill devices, and T tokens in whole blocks:

    t = latency + T b max(1, n / m) / W

One transfer at a time leaves a prefill engine and enters a decode engine. Source: the pull protocol of vLLM's NIXL
connector (the source frees blocks once they are read).

Layer-wise (Mooncake), a layer's KV leaves while the next layer computes. The first of L layers is ready at 1/L of the
prefill time P; bytes move from then, or from when both links are free. At the end of the prefill the client waits for
the rest, at least the last layer:

    t = latency + max(B / L, B - W (time that the links had)) / W,    B = T b max(1, n / m)

If the decode engine has no free blocks by the end of the prefill, nothing has moved. Transfers may share a `Fabric`;
bytes moved during prefill are taken to have the full link rate."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import ceil

from simpy import Interrupt, Resource
from simpy.events import Event, Process

from perfmodel.cost import kv_bytes_per_token, state_bytes_per_sequence
from perfmodel.engine import Request
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.specs.hardware import SLICES_OF_A_CARD
from perfmodel.specs.networks import Link
from perfmodel.specs.scenario import Scenario

Copies = tuple[Request, Request]  # of a client's request, on its prefill and its decode replica


@dataclass(slots=True, eq=False)
class _Flow:
    left: float
    cap: float
    done: Event
    rate: float = 0.0


class Fabric:
    """Shared bandwidth between all links: `bandwidth_bytes_per_s` for all transfers together.

    Max-min fairness, as fair queueing in a switch or long TCP flows over one bottleneck approach. With bandwidth W and
    transfers of caps c_i each moves at min(c_i, w), with w such that the rates sum to W or all are at their caps."""

    def __init__(self, env: TickEnvironment, bandwidth_bytes_per_s: float) -> None:
        self._env, self._bandwidth = env, bandwidth_bytes_per_s
        self._flows: list[_Flow] = []
        self._as_of = 0
        self._alarm: Alarm | None = None

    def move(self, num_bytes: float, cap_bytes_per_s: float) -> Event:
        """Event of `num_bytes` having passed at up to `cap_bytes_per_s`."""
        self._pass()
        flow = _Flow(num_bytes, cap_bytes_per_s, Event(self._env))
        self._flows.append(flow)
        self._share()
        return flow.done

    def stop(self, done: Event) -> None:
        """Cancel the transfer behind `done`; the others share its bandwidth."""
        self._pass()
        self._flows = [flow for flow in self._flows if flow.done is not done]
        self._share()

    def _pass(self) -> None:
        seconds = (self._env.ticks - self._as_of) / TICKS_PER_S
        self._as_of = self._env.ticks
        for flow in self._flows:
            flow.left -= flow.rate * seconds

    def _share(self) -> None:
        """Set rates, slowest links first, and the alarm for the first to finish."""
        left = self._bandwidth
        for number, flow in enumerate(sorted(self._flows, key=lambda flow: flow.cap)):
            flow.rate = min(flow.cap, left / (len(self._flows) - number))
            left -= flow.rate
        self._alarm = None
        if self._flows:
            seconds = min(max(flow.left, 0.0) / flow.rate for flow in self._flows)
            self._alarm = Alarm(self._env, ceil(seconds * TICKS_PER_S), self._look, ARRIVAL_PRIORITY)

    def _look(self, alarm: Event) -> None:
        if alarm is not self._alarm:
            return
        self._pass()
        through = [flow for flow in self._flows if flow.left <= flow.rate / TICKS_PER_S]  # less than a tick is left
        self._flows = [flow for flow in self._flows if flow.left > flow.rate / TICKS_PER_S]
        for flow in through:
            flow.done.succeed()
        self._share()


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Duration of a transfer in seconds over its busiest link.

    bytes_per_token, bytes_per_sequence: on that link; bytes_factor: total over all links, relative to it"""

    latency_s: float
    bandwidth_bytes_per_s: float
    bytes_per_token: float
    bytes_per_sequence: float
    bytes_factor: float
    block_size: int
    rolling_span: int | None = None  # most tokens kept; None: all
    num_layers: int = 1

    def link_bytes(self, num_tokens: int) -> float:
        """Bytes over the busiest link for the KV of `num_tokens`: whole blocks plus any recurrent state."""
        if self.rolling_span is not None:
            num_tokens = min(num_tokens, self.rolling_span)
        whole = -(-num_tokens // self.block_size) * self.block_size
        return whole * self.bytes_per_token + self.bytes_per_sequence

    def duration_s(self, num_tokens: int) -> float:
        return self.latency_s + self.link_bytes(num_tokens) / self.bandwidth_bytes_per_s


def transfer_cost(source: Scenario, target: Scenario, source_link: Link, target_link: Link) -> TransferCost:
    """Cost between an engine (data-parallel rank) of `source` and one of `target`; the slower of `source_link` and
    `target_link` sets the rate. Pipeline stages of unequal size are averaged."""
    shard = Sharding.of(target.engine)
    model = served_model(target.model, target.engine)
    layers = list(model.iter_layers())
    num_to = shard.tp * shard.pp
    num_from = source.engine.num_devices // source.engine.data_parallel_size
    per_link = max(1.0, num_to / num_from) / shard.pp
    return TransferCost(
        max(source_link.latency_s, target_link.latency_s),
        min(source_link.bandwidth_bytes_per_s, target_link.bandwidth_bytes_per_s),
        kv_bytes_per_token(model, shard, layers) * per_link,
        state_bytes_per_sequence(model, shard, layers) * per_link,
        min(num_to, num_from),
        source.engine.kv_block_tokens,
        model.rolling_span,
        len(layers),
    )


def pcie_of_slices(scenario: Scenario) -> tuple[int, float] | None:
    """Cards that the scenario's slices of GPUs fill, largest first, and the PCIe bandwidth of these in bytes/s, one
    way; None where other devices or links are used. Slices have no peer access, nor CUDA IPC across instances (NVIDIA
    MIG user guide, application considerations): what they exchange goes through the host, over their card's PCIe."""
    spec = scenario.cluster.kv_transfer
    pools = [pool for pool in scenario.pools if pool.role in ("prefill", "decode")]
    devices = [(pool.most_replicas, pool.hardware or scenario.hardware) for pool in pools]
    if spec.shared or any(not device.is_slice or spec.link_of(device).name != "pcie" for _, device in devices):
        return None
    cards: list[tuple[str, int, int]] = []  # with their compute and memory slices that are left
    slices = [(*device.slices_of_card, device.card) for count, device in devices for _ in range(count)]
    for compute, memory, name in sorted(slices, reverse=True):
        fitting = (card for card in cards if card[0] == name and card[1] >= compute and card[2] >= memory)
        card = next(fitting, (name, *SLICES_OF_A_CARD))
        if card in cards:
            cards.remove(card)
        cards.append((name, card[1] - compute, card[2] - memory))
    return len(cards), len(cards) * min(spec.link_of(device).bandwidth_bytes_per_s for _, device in devices)


class KvTransfers:
    """Runs and counts transfers between engines.

    A transfer waits for its source's link, then its target's. Sources and targets are disjoint, so no deadlock.

    is_layerwise: overlap with prefill, layer by layer; fabric: shared bandwidth, if it can be the bottleneck"""

    def __init__(self, env: TickEnvironment, is_layerwise: bool = False, fabric: Fabric | None = None) -> None:
        self.env, self._is_layerwise, self._fabric = env, is_layerwise, fabric
        self._free_since: dict[Resource, int] = {}
        self._links: dict[tuple[str, int], Resource] = {}
        self.num_transfers = self.num_abandoned = 0
        self.num_bytes = 0.0
        self.ticks = 0  # from request to last byte, summed

    def start(
        self,
        cost: TransferCost,
        source: int,
        target: int,
        num_tokens: int,
        done: Callable[[], None],
        computed: tuple[int, int] | None = None,
        of: Copies | None = None,
    ) -> Process:
        """Move the KV of `num_tokens` from engine `source` to `target` at `cost`, then call `done`.

        computed: ticks at which the prefill began and ended; None: all of it moves from now on
        of: the request there and here, for who moves its blocks"""
        links = self._link("out", source), self._link("in", target)
        left = whole = cost.link_bytes(num_tokens)
        if self._is_layerwise and computed and not any(link.count or link.queue for link in links):
            left = self._left_bytes(cost, whole, *computed, max(self._free_since.get(link, 0) for link in links))
        carrying = self._carry(cost, left, (source, target), of)
        return self.env.process(self._move(*links, whole * cost.bytes_factor, carrying, done))

    def _left_bytes(self, cost: TransferCost, whole: float, began: int, ended: int, free_since: int) -> float:
        """Bytes that have not moved although the target keeps room for layers that come early: all but the last
        layer can move until `ended`, it too since."""
        per_tick = cost.bandwidth_bytes_per_s / TICKS_PER_S
        first = max(began + (ended - began) // cost.num_layers, free_since)
        left = max(whole / cost.num_layers, whole - max(0, ended - first) * per_tick)
        return max(0.0, left - (self.env.ticks - max(ended, free_since)) * per_tick)

    def abandon(self, transfer: Process) -> None:
        """Cancel `transfer`, whose engine is gone; its `done` is never called."""
        self.num_abandoned += 1
        transfer.interrupt()

    def _link(self, way: str, engine: int) -> Resource:
        if (way, engine) not in self._links:
            self._links[way, engine] = Resource(self.env)
        return self._links[way, engine]

    def _move(
        self,
        out: Resource,
        into: Resource,
        num_bytes: float,
        carrying: Generator[Event, None, None],
        done: Callable[[], None],
    ) -> Generator[Event, None, None]:
        """Transfer `num_bytes` in all by `carrying`, once both links are free."""
        asked_at = self.env.ticks
        try:
            with out.request() as leaves:
                yield leaves
                with into.request() as enters:
                    yield enters
                    yield from carrying
        except Interrupt:
            return
        finally:
            self._free_since[out] = self._free_since[into] = self.env.ticks
        self.num_transfers += 1
        self.num_bytes += num_bytes
        self.ticks += self.env.ticks - asked_at
        done()

    def take(self, cost: TransferCost, left_bytes: float, ends: tuple[int, int], of: Copies | None) -> int:
        """Ticks in which `left_bytes` move at `cost` between engines `ends`, whose links are free; of: see `start`."""
        return to_ticks(cost.latency_s + left_bytes / cost.bandwidth_bytes_per_s)

    def _carry(
        self, cost: TransferCost, left_bytes: float, ends: tuple[int, int], of: Copies | None
    ) -> Generator[Event, None, None]:
        if self._fabric is None:
            yield self.env.timeout(self.take(cost, left_bytes, ends, of))
            return
        yield self.env.timeout(to_ticks(cost.latency_s))
        all_links = cost.bytes_factor
        moved = self._fabric.move(left_bytes * all_links, cost.bandwidth_bytes_per_s * all_links)
        try:
            yield moved
        except Interrupt:
            self._fabric.stop(moved)
            raise
