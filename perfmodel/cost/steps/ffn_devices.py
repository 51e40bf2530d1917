"""Steps whose attention and feed-forward layers are on different devices (AFD): M micro-batches go to and fro.

A micro-batch takes in each of L layers attention (a), the way to the feed-forward devices (x), their all-gather (g),
work (f) and reduce-scatter (r), and the way back (y); the resource of each, but one for g and r, others use meanwhile.
With s = a + x + g + f + r + y and the busiest b = max(a, x, g + r, f, y), equal micro-batches take

    t = (L - 1) max( s, M b ) + s + (M - 1) b

exact for a line of machines that M equal jobs pass L times (g or r none): a path through it that returns c times takes
(c + 1) s + (L M - 1 - c M) b, longest for c = 0 or L - 1. Embedding, head and sampling of the whole step come on top;
unlike layers are timed at their mean. Each micro-batch has its share of decodes and of every prompt, the latter behind
as many tokens as such shares have before them on average. Source: Zhu et al. 2025 (MegaScale-Infer, arXiv 2504.02263),
the case M b >= s; StepMesh, Introduction.md (stepfun-ai/StepMesh)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.steps.cost_model import GraphCostModel
from perfmodel.cost.steps.curve import DecodeRun
from perfmodel.cost.steps.explain import PipelineEstimate, StepEstimate, bound_share, explain, summed
from perfmodel.cost.steps.host import Host, step_ticks
from perfmodel.cost.steps.tables import PS_PER_S, StepTables, Usage
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.work import BatchShape

_OUTSIDE = ("embedding", "final_norm", "lm_head", "logits_all_gather", "sample")


class Phases(NamedTuple):
    """Times of a micro-batch in any unit."""

    attention: float
    to_ffn: float
    gather: float
    ffn: float
    scatter: float
    to_attention: float


def round_trips(phases: Phases, num_layers: int, num_batches: int) -> float:
    """Time in which `num_batches` equal micro-batches pass all phases of a layer `num_layers` times."""
    lone, within_server = sum(phases), phases.gather + phases.scatter
    busiest = max(within_server, *phases)
    return (num_layers - 1) * max(lone, num_batches * busiest) + lone + (num_batches - 1) * busiest


class FfnDevicesCostModel:
    """Prices steps of `tables`, whose graph has feed-forward devices. draw: error factors, for ensembles"""

    def __init__(self, tables: StepTables, draw: Draw | None = None) -> None:
        self.has_runs = False
        graph, ffn = tables.graph, tables.graph.ffn
        assert ffn is not None
        self._tables, self._draw, self._ranks = tables, draw, graph.shard.dp
        self._host = Host(graph, tables.timer, draw)
        self._parts = tuple(_parts(graph, ffn))
        self._models = [GraphCostModel(StepTables(part, tables.timer), draw, host_share=0.0) for part in self._parts]
        share = self._ranks / (self._ranks + ffn.shard.tp)  # of the devices, those of attention
        self._shares = (share, share, 0.0, 0.0, 1.0 - share, 0.0, 0.0)  # messages are beside work

    def fresh(self) -> "FfnDevicesCostModel":
        return FfnDevicesCostModel(self._tables, self._draw)

    def duration_ps(self, shape: BatchShape) -> int:
        count, batch, everyone = self._micro_batches(shape)
        outside, *phases = self._models
        shapes = (batch, *[everyone] * 5)
        times = [[model.duration_ps(one) for _ in range(count)] for model, one in zip(phases, shapes, strict=True)]
        return step_ticks(*self._launched(shape, count), round(outside.duration_ps(shape) + self._passed(times)))

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """None: steps are priced one by one."""
        return None

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step in rows of a device on the average of both kinds; messages as one end has them."""
        timer, (count, batch, everyone) = self._tables.timer, self._micro_batches(shape)
        shapes = (shape, batch, *[everyone] * 5)
        parts = [explain(part, timer, one) for part, one in zip(self._parts, shapes, strict=True)]
        runs = [share * (count if place else 1) for place, share in enumerate(self._shares)]
        pairs, phases = list(zip(parts, runs, strict=True)), [part.device_s for part in parts]
        rows = [replace(row, count=row.count * (times or count)) for part, times in pairs for row in part.rows]
        device = phases[0] + self._passed([[phase] * count for phase in phases[1:]])
        serial, hidden = (ticks / PS_PER_S for ticks in self._launched(shape, count))
        duration = serial + max(hidden, device)
        idle = 1.0 - sum(times * part.device_s for part, times in pairs) / duration
        whole = summed(rows, duration, (serial, hidden), timer)
        pipeline = PipelineEstimate(count, (phases[1], phases[4]), sum(phases[1:]), idle)
        share = bound_share(rows, whole.device_s, whole.device_s)
        return replace(whole, bound_share=share, pipeline=pipeline)

    def usage(self) -> Usage:
        """Totals over all steps so far, for the mean device of both kinds."""
        total = Usage()
        for model, share in zip(self._models, self._shares, strict=True):
            total.add(model.usage(), share)
        return total

    def _passed(self, times: Sequence[Sequence[float]]) -> float:
        num_layers = self._tables.graph.num_ffn_layers
        return round_trips(Phases(*[phase[0] / num_layers for phase in times]), num_layers, len(times[0]))

    def _micro_batches(self, shape: BatchShape) -> tuple[int, BatchShape, BatchShape]:
        """How many there are, one of a rank, and one of all ranks."""
        count = max(1, min(self._tables.graph.num_micro_batches, shape.num_tokens))
        prompts = [
            (max(ceil(new / count), 2), cached + new * (count - 1) // (2 * count)) for new, cached in shape.prefills
        ]
        decodes = ceil(shape.num_decodes / count)
        tokens = decodes + sum([new for new, _ in prompts])
        context, *windowed = (ceil(item / count) for item in (shape.decode_context, *shape.decode_windowed))
        batch = BatchShape(tokens, tokens, tuple(prompts), decodes, context, tuple(windowed))
        everyone = ceil(shape.group_tokens / count) or self._ranks * tokens
        return count, batch, BatchShape(everyone, 0)

    def _launched(self, shape: BatchShape, count: int) -> tuple[int, int]:
        """Serial and hidden picoseconds of the host, which launches `count` parts of a step without a CUDA graph."""
        serial, hidden = self._host.ticks(shape)
        decodes = shape._replace(prefills=(), num_decodes=shape.num_decodes + len(shape.prefills))
        return serial, count * hidden - (count - 1) * self._host.ticks(decodes)[1]


def _parts(graph: StepGraph, ffn: StepGraph) -> Iterator[StepGraph]:
    """Outside the layers, and `Phases`."""
    for is_outside in (True, False):
        nodes = [node for node in graph.nodes if (node.name in _OUTSIDE) == is_outside]
        yield replace(graph, nodes=tuple(nodes), mixed=(), ffn=None)
    to_ffn, gather, *blocks, scatter, to_attention = ffn.nodes
    for part in ([to_ffn], [gather], blocks, [scatter], [to_attention]):
        yield replace(ffn, nodes=tuple(part))
