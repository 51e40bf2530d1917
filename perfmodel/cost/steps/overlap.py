"""Two-batch overlap: a step's tokens in two halves, one of which computes while tokens of the other travel.

In each of L layers with experts a half takes attention (a: all up to the dispatch), dispatch (d), experts (e), combine
(c). The halves take turns on the units that compute and on the links:

    compute   a1   a2      e1      e2      a1'     a2' ...
    links          d1      d2      c1      c2      d1' ...

    t = a1 + L (a2 | d1) + L (e1 | d2) + L (e2 | c1) + (L - 1) (a1 | c2) + c2,    (x | y) = max(y, x / (1 - f))

f is the share of the compute units that are messages': 20 for DeepEP's normal kernels, none for its low-latency ones.
Engines keep their products off these for the whole step, whether a message is on its way or not. Layers without
experts, and what else a step does, are added. Each half reads its own weights and launches its own kernels; logits are
computed once. So t is at least the compute and at least the messages of both halves; with f = 0 at most their sum.

Steps that only decode are split from `dbo_decode_token_threshold` tokens on each rank, others from
`dbo_prefill_token_threshold`, if all ranks can be; a half has tokens up to the middle one of the largest rank, wherever
a prompt is cut (`RankPadding.first_half`).
Source: vLLM, vllm/v1/worker/ubatch_utils.py (thresholds, cut, units: VLLM_DBO_COMM_SMS, 20), ubatching.py and
fused_moe/modular_kernel.py (turns); SGLang, batch_overlap/operations_strategy.py (deep_gemm_num_sms); DeepSeek-AI 2024
(DeepSeek-V3), section 3.4; DeepEP, README ("without occupying any SM")."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.steps.cost_model import GraphCostModel
from perfmodel.cost.steps.curve import DecodeRun
from perfmodel.cost.steps.explain import StepEstimate, explain, summed
from perfmodel.cost.steps.host import Host, step_ticks
from perfmodel.cost.steps.tables import PS_PER_S, StepTables, Usage
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.messages import NORMAL_UNITS
from perfmodel.ops.work import BatchShape

_MESSAGES = ("moe_dispatch", "moe_combine")
_DENSE = ("gate_up_proj", "gate_proj", "up_proj", "activation", "down_proj", "mlp_all_reduce")
_OUTSIDE = (*_DENSE, "embedding", "embedding_all_reduce", "final_norm", "lm_head", "logits_all_gather", "sample")
_IN_BLOCK = ("router", "topk", "shared_", "latent_", "moe_")
_LANES = ("attention", "block", "experts", *_MESSAGES, "outside")


class Half(NamedTuple):
    """Times of one half in any unit, all layers: see the module. outside: of layers with experts"""

    attention: float
    experts: float
    dispatch: float
    combine: float
    outside: float

    @property
    def compute(self) -> float:
        return self.attention + self.experts + self.outside

    @property
    def messages(self) -> float:
        return self.dispatch + self.combine


def overlapped(first: Half, second: Half, num_layers: int, share: float = 0.0) -> float:
    """Time of the halves `first` and `second` over `num_layers` with experts. share: of the units, f, below 1"""

    def together(compute: float, message: float) -> float:
        return max(message, compute / (1 - share))

    inside = together(second.attention, first.dispatch) + together(first.experts, second.dispatch)
    inside += together(second.experts, first.combine)
    ends = together(first.attention, 0.0) + second.combine
    ends += (num_layers - 1) * together(first.attention, second.combine)
    return first.outside + second.outside + inside + ends / num_layers


def halves(shape: BatchShape, num_ranks: int = 0) -> tuple[BatchShape, BatchShape]:
    """The step cut before its middle token, or that of the largest of `num_ranks`: decodes come first, and a prompt may
    be cut. All logits are the first's.

    So are all images: the encoder is done before the step is cut (vllm/v1/worker/gpu_model_runner.py,
    `_execute_mm_encoder`)."""
    first_tokens = shape.first_half or shape.num_tokens // 2
    decodes = min(shape.num_decodes, first_tokens)
    room, fronts, backs = first_tokens - decodes, list[tuple[int, int]](), list[tuple[int, int]]()
    for new, cached in shape.prefills:
        front = min(new, room)
        room -= front
        fronts += [(front, cached)] if front else []
        backs += [(new - front, cached + front)] if new > front else []
    share = decodes / max(shape.num_decodes, 1)
    context = round(shape.decode_context * share)
    windowed = tuple([round(seen * share) for seen in shape.decode_windowed])
    everyone = num_ranks * shape.first_half or shape.group_tokens * first_tokens // max(shape.num_tokens, 1)
    first = BatchShape(first_tokens, shape.num_samples, tuple(fronts), decodes, context, windowed, everyone)
    first = first._replace(images=shape.images)
    second = BatchShape(
        shape.num_tokens - first_tokens,
        0,
        tuple(backs),
        shape.num_decodes - decodes,
        shape.decode_context - context,
        tuple([seen - before for seen, before in zip(shape.decode_windowed, windowed, strict=True)]),
        shape.group_tokens - everyone,
    )
    return first, second


def lane_of(name: str) -> str:
    """Which of `_LANES` the operator is in; mixers are in layers with and without experts alike."""
    name = name.partition("@")[0]
    if name.startswith("experts"):
        return "experts"
    if name in _MESSAGES:
        return name
    if name in _OUTSIDE or name.startswith("encoder_"):
        return "outside"
    return "block" if name.startswith(_IN_BLOCK) else "attention"


class OverlapCostModel:
    """Prices steps of `tables`, in two halves where their engine splits them. draw: error factors, for ensembles"""

    def __init__(self, tables: StepTables, draw: Draw | None = None) -> None:
        self.has_runs = False
        self._tables, self._draw = tables, draw
        self._host = Host(tables.graph, tables.timer, draw)
        self._whole = GraphCostModel(tables, draw)
        graph = tables.graph
        parts = [StepTables(_part(graph, lane), tables.timer) for lane in _LANES]
        self._lanes = [GraphCostModel(part, draw, host_share=0.0) for part in parts]
        self._num_layers = sum(node.count for node in graph.nodes if lane_of(node.name) == _MESSAGES[0])
        self._hidden = 0  # picoseconds of messages under work

    def fresh(self) -> "OverlapCostModel":
        return OverlapCostModel(self._tables, self._draw)

    def is_split(self, shape: BatchShape) -> bool:
        """Whether each rank has tokens enough; one that has fewer than its share of the group's holds up all.

        The ranks' agreement comes first, if there is one."""
        if shape.first_half:
            return shape.first_half > 0
        thresholds, ranks = self._tables.graph.overlap_from, self._tables.graph.shard.dp
        assert thresholds is not None
        tokens = min(shape.num_tokens, shape.group_tokens // ranks) if shape.group_tokens else shape.num_tokens
        return tokens >= thresholds[bool(shape.prefills)]

    def duration_ps(self, shape: BatchShape) -> int:
        if not self.is_split(shape):
            return self._whole.duration_ps(shape)
        pair = [self._half([lane.duration_ps(half) for lane in self._lanes]) for half in self._halves(shape)]
        device = round(self._device(pair, shape))
        self._hidden += round(sum(half.compute + half.messages for half in pair)) - device
        return step_ticks(*self._launched(shape), device)

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """None: steps are priced one by one."""
        return None

    def explain(self, shape: BatchShape) -> StepEstimate:
        """Rows of both halves; those of the exchange have what work does not hide."""
        tables = self._tables
        if not self.is_split(shape):
            return explain(tables.graph, tables.timer, shape)
        parts = [explain(tables.graph, tables.timer, half) for half in self._halves(shape)]
        pair = [self._half(_by_lane(part)) for part in parts]
        device, messages = self._device(pair, shape), sum(half.messages for half in pair)
        shown = (device - sum(half.compute for half in pair)) / messages if messages else 0.0
        rows = [
            replace(
                row,
                name=f"{row.name}@{half}",
                time=row.time.times(shown) if lane_of(row.name) in _MESSAGES else row.time,
            )
            for half, part in zip(("first_half", "second_half"), parts, strict=True)
            for row in part.rows
        ]
        serial, hidden = (ticks / PS_PER_S for ticks in self._launched(shape))
        return summed(rows, serial + max(hidden, device), (serial, hidden), tables.timer)

    def usage(self) -> Usage:
        """Totals over all steps so far."""
        total = self._whole.usage()
        for lane in self._lanes:
            total.add(lane.usage(), 1)
        total.bound_s["communication"] -= self._hidden / PS_PER_S
        return total

    def _halves(self, shape: BatchShape) -> tuple[BatchShape, BatchShape]:
        return halves(shape, self._tables.graph.shard.dp)

    def _half(self, lanes: Sequence[float]) -> Half:
        """The half with these times of `_LANES`; of mixers the part in layers with experts."""
        mixers, block, experts, dispatch, combine, outside = lanes
        inside = mixers * self._num_layers / self._tables.graph.num_layers
        return Half(inside + block, experts, dispatch, combine, outside + mixers - inside)

    def _device(self, pair: Sequence[Half], shape: BatchShape) -> float:
        graph, device = self._tables.graph, self._tables.timer.device
        units = NORMAL_UNITS if graph.shard.route_of(bool(shape.prefills)) == "node" else 0
        return overlapped(pair[0], pair[1], self._num_layers, units / device.compute_units)

    def _launched(self, shape: BatchShape) -> tuple[int, int]:
        """Serial and hidden picoseconds of the host, which launches both halves of a step without a CUDA graph."""
        serial, hidden = self._host.ticks(shape)
        decodes = shape._replace(prefills=(), num_decodes=shape.num_decodes + len(shape.prefills))
        encoder = self._host.encoder if shape.images else 0
        return serial, 2 * hidden - self._host.ticks(decodes)[1] + encoder


def _by_lane(estimate: StepEstimate) -> list[float]:
    return [sum(row.duration_s for row in estimate.rows if lane_of(row.name) == lane) for lane in _LANES]


def _part(graph: StepGraph, lane: str) -> StepGraph:
    """`graph` with the nodes of `lane` only; mixed kernels stay with the mixers."""
    nodes = tuple(node for node in graph.nodes if lane_of(node.name) == lane)
    return replace(graph, nodes=nodes, mixed=graph.mixed if lane == "attention" else ())
