"""KV blocks on their way back from a second tier: how long, and from how many tokens on it beats computing them again.

    t = blocks latency + tokens b / W           b: bytes of a token on one device, W: its link to the tier

Layer by layer beside the step, the last of L layers computes after its blocks are there: max(step, t) + min(step, t)/L.
Copies the other way use the link's other direction and hide beside steps. Without overlap a step waits for both: what
its blocks held before goes out, what it needs comes in, then it is computed.
Source: CachedAttention (Gao et al. 2024): loading layer by layer; vLLM's offloading connector; vLLM before version 1,
`CacheEngine.swap_out` and `swap_in`: copies both ways on the stream of the step that follows.
"""

from dataclasses import dataclass

from perfmodel.cost.memory.footprint import kv_bytes_per_token
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.stages import estimate_step
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.spec import KvOffload
from perfmodel.specs.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """What blocks take over the link of one device.

    layers: of the model, 0 where the step waits for all of them
    block_size: tokens of a block
    """

    latency_s: float
    bytes_per_s: float
    bytes_per_token: float
    layers: int
    block_size: int

    @property
    def block_bytes(self) -> float:
        """Bytes of a block on the link."""
        return self.bytes_per_token * self.block_size

    @property
    def is_awaited(self) -> bool:
        """Whether a step begins after its copies, those to the tier included."""
        return not self.layers

    def alone_s(self, num_tokens: float, num_blocks: float) -> float:
        """Seconds of the copies."""
        return num_blocks * self.latency_s + num_tokens * self.bytes_per_token / self.bytes_per_s

    def added_s(self, step_s: float, num_tokens: float, num_blocks: float, num_stored: float = 0) -> float:
        """By how many seconds a step takes longer for copies.

        step_s: of the step without; num_tokens, num_blocks: that come back for it
        num_stored: blocks that go to the tier, which it waits for too where copies are not beside it
        """
        alone = self.alone_s(num_tokens, num_blocks)
        if not self.layers:
            return alone + self.alone_s(num_stored * self.block_size, num_stored)
        return max(step_s, alone) + min(step_s, alone) / self.layers - step_s


def restore_cost(scenario: Scenario, offload: KvOffload, graph: StepGraph) -> RestoreCost:
    """What restoring takes the scenario's engine; pipeline stages fetch their layers side by side."""
    link, model = offload.link_of(scenario.hardware), graph.model
    shard = Sharding.of(scenario.engine)
    per_token = kv_bytes_per_token(model, shard, list(model.iter_layers())) / shard.pp
    return RestoreCost(
        link.latency_s,
        link.bandwidth_bytes_per_s,
        per_token,
        model.num_layers if offload.overlap else 0,
        scenario.engine.block_size,
    )


def least_restored_tokens(scenario: Scenario, offload: KvOffload, graph: StepGraph, timer: OperatorTimer) -> int:
    """The fewest tokens that are restored: as the rule says; else the first power of two that is quicker.

    scenario, offload: the engine, and where its blocks go; graph, timer: what computing them again takes
    """
    longest = scenario.engine.max_model_len or scenario.model.max_position_embeddings
    if offload.rule != "faster":
        return 1 if offload.rule == "restore" else longest + 1
    cost, block = restore_cost(scenario, offload, graph), scenario.engine.block_size
    tokens, num_stages = block, max(len(graph.stages), 1)  # that compute a prompt one after another
    while tokens <= longest:
        recomputed = estimate_step(graph, timer, BatchShape(tokens, 1, ((tokens, 0),))).device_s
        if cost.alone_s(tokens, tokens / block) < num_stages * recomputed:
            return tokens
        tokens *= 2
    return longest + 1
