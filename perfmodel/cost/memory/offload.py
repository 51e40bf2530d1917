"""KV offloading: time to restore blocks from a second tier, and when that beats recomputing.

    t = blocks latency + tokens b / W           b: bytes of a token on one device, W: its link to the tier

Layer-wise loading overlaps with the step; the last of L layers waits for its blocks: max(step, t) + min(step, t)/L.
Stores use the link's other direction and hide beside steps. Without overlap a step waits for both, stores first.
Source: CachedAttention (Gao et al. 2024): loading layer by layer; vLLM's offloading connector; vLLM before version 1,
`CacheEngine.swap_out` and `swap_in`: copies both ways on the stream of the step that follows."""

from dataclasses import dataclass

from perfmodel.cost.memory.footprint import kv_bytes_per_token
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.stages import estimate_step
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.offload import KvOffload
from perfmodel.specs.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """Restoring over the link of one device.

    layers: of the model; 0 if the step waits for all blocks
    block_size: tokens per block"""

    latency_s: float
    bytes_per_s: float
    bytes_per_token: float
    layers: int
    block_size: int

    @property
    def block_bytes(self) -> float:
        return self.bytes_per_token * self.block_size

    @property
    def is_awaited(self) -> bool:
        """Whether a step waits for its copies, stores included."""
        return not self.layers

    def alone_s(self, num_tokens: float, num_blocks: float) -> float:
        return num_blocks * self.latency_s + num_tokens * self.bytes_per_token / self.bytes_per_s

    def added_s(self, step_s: float, num_tokens: float, num_blocks: float, num_stored: float = 0) -> float:
        """Seconds that copies add to a step of `step_s`.

        num_tokens, num_blocks: restored for it; num_stored: blocks to the tier, waited for only without overlap"""
        alone = self.alone_s(num_tokens, num_blocks)
        if not self.layers:
            return alone + self.alone_s(num_stored * self.block_size, num_stored)
        return max(step_s, alone) + min(step_s, alone) / self.layers - step_s


def restore_cost(scenario: Scenario, offload: KvOffload, graph: StepGraph) -> RestoreCost:
    """Restore cost of the scenario's engine; pipeline stages fetch their layers in parallel."""
    link, model = offload.link_of(scenario.hardware), graph.model
    shard = Sharding.of(scenario.engine)
    per_token = kv_bytes_per_token(model, shard, list(model.iter_layers())) / shard.pp
    num_layers, size = model.num_layers if offload.overlap else 0, scenario.engine.block_size
    return RestoreCost(link.latency_s, link.bandwidth_bytes_per_s, per_token, num_layers, size)


def least_restored_tokens(scenario: Scenario, offload: KvOffload, graph: StepGraph, timer: OperatorTimer) -> int:
    """The fewest tokens worth restoring: the rule's, else the first power of two that is faster than recomputing.

    scenario, offload: the engine and its tier; graph, timer: cost of recomputing"""
    longest = scenario.engine.max_model_len or scenario.model.max_position_embeddings
    if offload.rule != "faster":
        return 1 if offload.rule == "restore" else longest + 1
    cost, tokens = restore_cost(scenario, offload, graph), scenario.engine.block_size
    while tokens <= longest:
        if cost.alone_s(tokens, tokens / cost.block_size) < recompute_s(graph, timer, tokens):
            return tokens
        tokens *= 2
    return longest + 1


def recompute_s(graph: StepGraph, timer: OperatorTimer, tokens: int) -> float:
    """Time to compute a prompt of `tokens` on an idle engine; stages compute it one after another."""
    step = estimate_step(graph, timer, BatchShape(tokens, 1, ((tokens, 0),)))
    return max(len(graph.stages), 1) * step.device_s
