"""KV blocks on their way from a prefill to a decode replica: how long a transfer takes, and who waits for whom.

Every device has its own link. A decode device receives its part of each token (latent KV is kept in full on every
device of a tensor-parallel group, so it is sent to each of them); prefill devices share what has to be sent evenly.
With b bytes per token on one of n decode devices, m prefill devices, and whole blocks of T tokens:

    t = latency + T b max(1, n / m) / W

at most one transfer at a time leaves a prefill engine, and one enters a decode engine. What is not modelled: transfer
of a layer while the next is computed, contention inside the fabric, prefixes that the decode engine has cached.
Source: the pull protocol of vLLM's NIXL connector (blocks are freed at the source once they have been read).
"""

__all__ = ["KvTransfers", "TransferCost", "transfer_cost"]

from collections.abc import Callable, Generator
from dataclasses import dataclass

from simpy import Resource
from simpy.events import Event

from perfmodel.cost import kv_bytes_per_token, state_bytes_per_sequence
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.sim.clock import TickEnvironment, to_ticks
from perfmodel.specs.hardware import Link
from perfmodel.specs.scenario import Scenario


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Of one transfer, over the busiest of the links that it uses.

    bytes_per_token, bytes_per_sequence: on that link; bytes_factor: times this, all links together
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    bytes_per_token: float
    bytes_per_sequence: float
    bytes_factor: float
    block_size: int
    rolling_span: int | None = None  # tokens that are kept at most, if not all

    def link_bytes(self, num_tokens: int) -> float:
        """Bytes over the busiest link for the KV of `num_tokens`: whole blocks, and the recurrent state if any."""
        if self.rolling_span is not None:
            num_tokens = min(num_tokens, self.rolling_span)
        whole = -(-num_tokens // self.block_size) * self.block_size
        return whole * self.bytes_per_token + self.bytes_per_sequence

    def duration_s(self, num_tokens: int) -> float:
        return self.latency_s + self.link_bytes(num_tokens) / self.bandwidth_bytes_per_s


def transfer_cost(source: Scenario, target: Scenario, source_link: Link, target_link: Link) -> TransferCost:
    """The cost between one engine (data-parallel rank) of `source` and one of `target`; the slower link sets the rate.

    Where pipeline stages differ in size the mean stands for them.
    """
    shard = Sharding.of(target.engine)
    model = served_model(target.model, target.engine)
    layers = list(model.iter_layers())
    num_to = shard.tp * shard.pp
    num_from = source.engine.tensor_parallel_size * source.engine.pipeline_parallel_size
    per_link = max(1.0, num_to / num_from) / shard.pp
    return TransferCost(
        max(source_link.latency_s, target_link.latency_s),
        min(source_link.bandwidth_bytes_per_s, target_link.bandwidth_bytes_per_s),
        kv_bytes_per_token(model, shard, layers) * per_link,
        state_bytes_per_sequence(model, shard, layers) * per_link,
        min(num_to, num_from),
        source.engine.block_size,
        model.rolling_span,
    )


class KvTransfers:
    """Carries out transfers between engines; counts them.

    A transfer first waits for its source's link, then for its target's; sources and targets are different engines, so
    no circle of waiting can close.
    """

    def __init__(self, env: TickEnvironment) -> None:
        self._env = env
        self._links: dict[tuple[str, int], Resource] = {}
        self.num_transfers = 0
        self.num_bytes = 0.0
        self.ticks = 0  # from the wish to the last byte, summed

    def start(self, cost: TransferCost, source: int, target: int, num_tokens: int, done: Callable[[], None]) -> None:
        """Move the KV of `num_tokens` from engine `source` to engine `target`, then call `done`."""
        self._env.process(self._move(cost, self._link("out", source), self._link("in", target), num_tokens, done))

    def _link(self, way: str, engine: int) -> Resource:
        link = self._links.get((way, engine))
        if link is None:
            link = self._links[way, engine] = Resource(self._env)
        return link

    def _move(
        self, cost: TransferCost, out: Resource, into: Resource, num_tokens: int, done: Callable[[], None]
    ) -> Generator[Event, None, None]:
        asked_at = self._env.ticks
        with out.request() as leaves:
            yield leaves
            with into.request() as enters:
                yield enters
                yield self._env.timeout(to_ticks(cost.duration_s(num_tokens)))
        self.num_transfers += 1
        self.num_bytes += cost.link_bytes(num_tokens) * cost.bytes_factor
        self.ticks += self._env.ticks - asked_at
        done()
