"""The time of a step, operator by operator, and its bounds.

    t_step = serial host + max( hidden host, sum over operators of count x t_op )

Operators run one after another, each bounded by its own resource: never a maximum of global sums. With pipeline stages
a step is the round in which each sequence gets a token (`stages`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from perfmodel.cost.kernel_models.device import OperatorTime
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.host import Host, step_seconds
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.work import BatchShape, Work
from perfmodel.renderable import Renderable, columns_of

_BOUNDS = ("compute", "memory", "communication", "overhead")


@dataclass(frozen=True, slots=True)
class OperatorEstimate:
    """One row: an operator that runs `count` times; `work` and `time` are of one run.

    The count is a mean under early exit. link: the slowest of its messages; num_nodes: of its group"""

    name: str
    count: float
    work: Work
    time: OperatorTime
    link: str = ""
    num_nodes: int = 1

    @property
    def flops(self) -> float:
        return self.count * self.work.flops

    @property
    def hbm_bytes(self) -> float:
        return self.count * self.work.hbm_bytes

    @property
    def message_bytes(self) -> float:
        return self.count * self.work.message.bytes_ if self.work.message else 0.0

    @property
    def intensity(self) -> float:
        return self.work.intensity

    @property
    def duration_s(self) -> float:
        return self.count * self.time.duration_s

    @property
    def bound(self) -> str:
        return self.time.bound

    def to_json(self) -> dict[str, Any]:
        """Totals over all runs on one device."""
        return {
            "name": self.name,
            "family": self.work.family,
            "rate": self.work.rate,
            "count": self.count,
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "message_bytes": self.message_bytes,
            "link": self.link or None,
            "num_nodes": self.num_nodes,
            "intensity": self.intensity,
            "duration_s": self.duration_s,
            "bound": self.bound,
        }


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """A step split into plans that pass several stages.

    num_plans:    how many; stage_s: seconds of the longest plan in each stage
    latency_s:    of a lone plan: the inter-token latency of a sequence that decodes alone
    bubble_share: idle share of all devices in the round"""

    num_plans: int
    stage_s: tuple[float, ...]
    latency_s: float
    bubble_share: float


@dataclass(frozen=True, slots=True)
class StepEstimate(Renderable):
    """A step on one device; `str()` prints the table of its operators.

    duration_s:     the step, host included
    device_s:       sum of the operators
    serial_host_s:  host time that always shows
    hidden_host_s:  host time beside the device; shows only where it is longer
    flops, hbm_bytes: per device
    mfu, mbu:       model FLOPs and bytes utilisation: share of the declared peaks over `duration_s`
    bound_share:    share of `duration_s` by what bounds the operators; launches and exposed host time are overhead
    pipeline:       of several stages; then rows are those of a device on their average, and `bound_share` is of the
                    time in which it has something to do"""

    rows: tuple[OperatorEstimate, ...]
    duration_s: float
    device_s: float
    serial_host_s: float
    hidden_host_s: float
    flops: float
    hbm_bytes: float
    mfu: float
    mbu: float
    bound_share: dict[str, float]
    origin: str
    pipeline: PipelineEstimate | None = None

    @property
    def bound(self) -> str:
        """What bounds the largest share of the step."""
        return max(self.bound_share, key=self.bound_share.__getitem__)

    def columns(self) -> dict[str, NDArray[Any]]:
        """A row for each operator: FLOPs, bytes and seconds are totals over its runs on one device."""
        return columns_of([row.to_json() for row in self.rows])

    @property
    def num_kernels(self) -> int:
        return round(sum(row.count * row.work.num_kernels for row in self.rows))


def explain(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> StepEstimate:
    """One pass of `shape` over the operators of `graph`, as if on one device."""
    rows = _rows(_nodes_of(graph, timer, shape), timer, shape)
    serial, hidden = Host(graph, timer).seconds(shape)
    device = sum(row.duration_s for row in rows)
    return summed(rows, step_seconds(serial, hidden, device), (serial, hidden), timer)


def summed(
    rows: Sequence[OperatorEstimate], duration: float, host: tuple[float, float], timer: OperatorTimer
) -> StepEstimate:
    """The estimate of a step with these `rows`.

    duration: seconds of the step; host: its serial and hidden seconds; timer: of the rows"""
    device = sum(row.duration_s for row in rows)
    at_peak = sum(row.count * timer.at_peak_s(row.work, timer.fit(row.work)) for row in rows)
    num_bytes = sum(row.hbm_bytes for row in rows)
    return StepEstimate(
        rows=tuple(rows),
        duration_s=duration,
        device_s=device,
        serial_host_s=host[0],
        hidden_host_s=host[1],
        flops=sum(row.flops for row in rows),
        hbm_bytes=num_bytes,
        mfu=at_peak / duration if duration else 0.0,
        mbu=num_bytes / timer.hardware.memory_bandwidth / duration if duration else 0.0,
        bound_share=bound_share(rows, duration, device),
        origin=timer.calibration.origin,
    )


def _rows(nodes: Sequence[OperatorNode], timer: OperatorTimer, shape: BatchShape) -> list[OperatorEstimate]:
    """Rows in node order; nodes with equal dependencies alternate, as in `StepTables`."""
    works = [(node, node.expected_runs(shape), work) for node in nodes if (work := node.work(shape)).num_kernels]
    rows: dict[int, OperatorEstimate] = {}
    for kind in {node.depends for node, _, _ in works}:
        result = [(place, *row) for place, row in enumerate(works) if row[0].depends is kind]
        times = timer.times([(count, work, timer.fit(work)) for _, _, count, work in result])
        for (place, node, count, work), time in zip(result, times, strict=True):
            rows[place] = OperatorEstimate(node.name, count, work, time, *_path(work, timer))
    return [rows[place] for place in range(len(works))]


def _path(work: Work, timer: OperatorTimer) -> tuple[str, int]:
    if work.message is None:
        return "", 1
    num_nodes = timer.device.spread(work.message).num_nodes
    return (timer.device.network if num_nodes > 1 else timer.device.link).name, num_nodes


def _nodes_of(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> list[OperatorNode]:
    """The graph's nodes, with the mixed kernel in steps with prompts and decodes."""
    if not (shape.prefills and shape.num_decodes and timer.mixes_attention):
        return list(graph.nodes)
    instead = {parts[-1].name: node for node, parts in graph.mixed}
    left_out = {part.name for _, parts in graph.mixed for part in parts} - set(instead)
    return [instead.get(node.name, node) for node in graph.nodes if node.name not in left_out]


def bound_share(rows: Sequence[OperatorEstimate], duration: float, device: float) -> dict[str, float]:
    """Shares of `duration` by what bounds operators; `device`: the sum of their times."""
    seconds = dict.fromkeys(_BOUNDS, 0.0)
    for row in rows:
        overhead = row.count * row.time.overhead_s
        seconds["overhead"] += overhead
        seconds[row.bound] += row.duration_s - overhead
    seconds["overhead"] += duration - device
    return {bound: value / duration if duration else 0.0 for bound, value in seconds.items()}
