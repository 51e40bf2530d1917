"""How long a step takes, operator by operator, and what bounds it.

    t_step = serial host + max( hidden host, sum over operators of count x t_op )

Operators run one after another on a device, each bounded by its own resource: never a maximum of global sums. Of
several pipeline stages, a step is the round in which each sequence of the batch gets a token (`flow_line`).
"""

__all__ = ["OperatorEstimate", "PipelineEstimate", "StepEstimate", "bound_share", "estimate_step", "host_fit"]

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfmodel.cost.calibration import HostFit
from perfmodel.cost.datasheet import EAGER_LAUNCH_S, EAGER_OPERATOR_S
from perfmodel.cost.flow_line import StageTimes, plans_of_round, round_time
from perfmodel.cost.rates import peak_flops_per_s
from perfmodel.cost.roofline import OperatorTime, OperatorTimer
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.work import BatchShape, Work, decode_shape

_BOUNDS = ("compute", "memory", "communication", "overhead")
# What comes once for a plan, and what comes with the layers of each stage.
_NOT_OF_STAGES = dict.fromkeys(
    ("serial_step_s", "serial_per_sequence_s", "hidden_step_s", "hidden_per_sequence_s", "prompt_step_s"), 0.0
)
_OF_STAGES = dict.fromkeys(("prompt_layer_s", "prompt_moe_layer_s", "hidden_prompt_layer_s"), 0.0)


@dataclass(frozen=True, slots=True)
class OperatorEstimate:
    """One row: an operator that runs `count` times; `work` and `time` are of one run, the sums of all.

    The count is a mean where tokens may leave layers out. link: the slowest that its messages go over, if it has any;
    num_nodes: that its group is on
    """

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

    @property
    def bound_and_link(self) -> str:
        """`bound`, and the network for messages that leave a node."""
        return f"{self.bound}, {self.link} ({self.num_nodes} nodes)" if self.num_nodes > 1 else self.bound


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """A step that is shared out to plans which pass several stages.

    num_plans:    how many; stage_s: seconds of one of them, the longest, in each stage
    latency_s:    of a plan that meets no other: a sequence that decodes alone waits as long for each token
    bubble_share: of the time of all devices in the round, what they do nothing in
    """

    num_plans: int
    stage_s: tuple[float, ...]
    latency_s: float
    bubble_share: float


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A step on one device. `str()` prints the roofline table.

    duration_s:     the step, host included
    device_s:       sum of the operators
    serial_host_s:  host time that always shows
    hidden_host_s:  host time beside the device; shows only where it is longer
    flops, hbm_bytes: per device
    mfu, mbu:       model FLOPs and bytes utilisation: share of the declared peaks over `duration_s`
    bound_share:    share of `duration_s` by what bounds the operators; launches and host time that shows are overhead
    pipeline:       of several stages; then rows are those of a device on their average, and `bound_share` is of the
                    time in which it has something to do
    """

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

    @property
    def num_kernels(self) -> int:
        return round(sum(row.count * row.work.num_kernels for row in self.rows))

    def __str__(self) -> str:
        return _table(self)


def host_fit(graph: StepGraph, timer: OperatorTimer) -> HostFit:
    """The host time of the timer's calibration, as it shows in this graph's steps.

    Without CUDA graphs, unless that is how the host was measured, the launches take EAGER_LAUNCH_S per kernel of a
    decode: they run ahead of the device and show only where they take longer. Plain PyTorch modules are no engine's
    host; theirs take EAGER_OPERATOR_S each under any calibration, but not on a CPU, which computes in the same thread.

    With pipeline stages the host of the engine plans each batch once, and a process on each stage launches its own
    layers: of the graph of all stages what comes once, of a stage's graph what comes with layers and launches.
    """
    calibration = timer.calibration
    is_plain = graph.is_plain and timer.hardware.kind != "cpu"
    host = calibration.host if graph.is_async else _synchronous(calibration.host)
    if graph.stage_layers is not None:
        host = host.model_copy(update=_NOT_OF_STAGES)
    if graph.stages:
        host = host.model_copy(update=_OF_STAGES)
    elif is_plain or (graph.is_eager and (calibration.origin == "datasheet" or host.replays_graphs)):
        shape = decode_shape(1, 1, graph.model.attention_spans)
        launch = EAGER_OPERATOR_S if is_plain else EAGER_LAUNCH_S
        num_kernels = sum(node.count * node.work(shape).num_kernels for node in graph.nodes)
        host = host.model_copy(update={"hidden_step_s": host.hidden_step_s + launch * num_kernels})
    return host if calibration.host_overheads == 1.0 else host.times(calibration.host_overheads)


def _synchronous(host: HostFit) -> HostFit:
    """Where the host plans a step only after the one before, what could hide beside the device shows."""
    return host.model_copy(
        update={
            "serial_step_s": host.serial_step_s + host.hidden_step_s,
            "serial_per_sequence_s": host.serial_per_sequence_s + host.hidden_per_sequence_s,
            "hidden_step_s": 0.0,
            "hidden_per_sequence_s": 0.0,
            "prompt_layer_s": host.prompt_layer_s + host.hidden_prompt_layer_s,
            "hidden_prompt_layer_s": 0.0,
        }
    )


def estimate_step(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> StepEstimate:
    """The estimate of one step of `shape` on `timer`'s device."""
    return _in_stages(graph, timer, shape) if graph.stages else _estimate(graph, timer, shape)


def _in_stages(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> StepEstimate:
    """A step in steady state: the round of the plans that `shape` is shared out to."""
    num_stages = len(graph.stages)
    rows: list[OperatorEstimate] = []
    plans: dict[StageTimes, int] = {}
    at_peak = busy = 0.0
    for plan, count in plans_of_round(shape, num_stages).items():
        once = _estimate(graph, timer, plan)
        stage_s = tuple(_estimate(stage, timer, plan).duration_s for stage in graph.stages)
        times, share = StageTimes(once.serial_host_s, once.hidden_host_s, stage_s), count / num_stages
        plans[times] = plans.get(times, 0) + count
        rows += [replace(row, count=share * row.count) for row in once.rows]  # of a device on the average
        at_peak += share * once.mfu * once.duration_s
        busy += share * sum(stage_s)
    duration, longest = round_time(plans), max(plans, key=lambda times: times.latency)
    device, num_bytes = sum(row.duration_s for row in rows), sum(row.hbm_bytes for row in rows)
    return StepEstimate(
        rows=tuple(rows),
        duration_s=duration,
        device_s=device,
        serial_host_s=longest.serial,
        hidden_host_s=longest.hidden,
        flops=sum(row.flops for row in rows),
        hbm_bytes=num_bytes,
        mfu=at_peak / duration if duration else 0.0,
        mbu=num_bytes / timer.hardware.memory_bandwidth / duration if duration else 0.0,
        bound_share=bound_share(rows, busy, device),
        origin=timer.calibration.origin,
        pipeline=PipelineEstimate(
            num_plans=sum(plans.values()),
            stage_s=longest.stages,
            latency_s=longest.latency,
            bubble_share=1.0 - busy / duration if duration else 0.0,
        ),
    )


def _estimate(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> StepEstimate:
    """One pass of `shape` over the operators of `graph`, as if they were all on one device."""
    rows = _rows(_nodes_of(graph, timer, shape), timer, shape)
    host = host_fit(graph, timer)
    num_seqs = shape.num_decodes + len(shape.prefills)
    serial, hidden = host.serial_s(num_seqs), host.hidden_s(num_seqs)
    if shape.prefills and shape.num_tokens > host.captured_tokens:
        serial += host.prompt_s(graph.num_layers, graph.num_moe_layers)
        hidden += host.hidden_prompt_layer_s * graph.num_layers
    device = sum(row.duration_s for row in rows)
    duration = serial + max(hidden, device)
    at_peak = sum(row.flops / peak_flops_per_s(timer.hardware, row.work.rate) for row in rows)
    num_bytes = sum(row.hbm_bytes for row in rows)
    return StepEstimate(
        rows=tuple(rows),
        duration_s=duration,
        device_s=device,
        serial_host_s=serial,
        hidden_host_s=hidden,
        flops=sum(row.flops for row in rows),
        hbm_bytes=num_bytes,
        mfu=at_peak / duration if duration else 0.0,
        mbu=num_bytes / timer.hardware.memory_bandwidth / duration if duration else 0.0,
        bound_share=bound_share(rows, duration, device),
        origin=timer.calibration.origin,
    )


def _rows(nodes: Sequence[OperatorNode], timer: OperatorTimer, shape: BatchShape) -> list[OperatorEstimate]:
    """In the order of the nodes; those that depend on the same things alternate, as in `StepTables`."""
    works = [(node, node.expected_runs(shape), work) for node in nodes if (work := node.work(shape)).num_kernels]
    found: dict[int, OperatorEstimate] = {}
    for kind in {node.depends for node, _, _ in works}:
        mine = [(place, *row) for place, row in enumerate(works) if row[0].depends is kind]
        times = timer.times([(count, work, timer.fit(work)) for _, _, count, work in mine])
        for (place, node, count, work), time in zip(mine, times, strict=True):
            found[place] = OperatorEstimate(node.name, count, work, time, *_path(work, timer))
    return [found[place] for place in range(len(works))]


def _path(work: Work, timer: OperatorTimer) -> tuple[str, int]:
    """The slowest link of a message, and the nodes of its group."""
    if work.message is None:
        return "", 1
    num_nodes = timer.device.spread(work.message).num_nodes
    return (timer.device.network if num_nodes > 1 else timer.device.link).name, num_nodes


def _nodes_of(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> list[OperatorNode]:
    """The graph's nodes; where prompts and decodes share a kernel and the step has both, that one for them."""
    if not (shape.prefills and shape.num_decodes and timer.mixes_attention):
        return list(graph.nodes)
    instead = {parts[-1].name: node for node, parts in graph.mixed}
    left_out = {part.name for _, parts in graph.mixed for part in parts} - set(instead)
    return [instead.get(node.name, node) for node in graph.nodes if node.name not in left_out]


def bound_share(rows: list[OperatorEstimate], duration: float, device: float) -> dict[str, float]:
    """Shares of `duration` by what bounds the operators; `device`: the sum of their times."""
    seconds = dict.fromkeys(_BOUNDS, 0.0)
    for row in rows:
        overhead = row.count * row.time.overhead_s
        seconds["overhead"] += overhead
        seconds[row.bound] += row.duration_s - overhead
    seconds["overhead"] += duration - device
    return {bound: value / duration if duration else 0.0 for bound, value in seconds.items()}


def _table(estimate: StepEstimate) -> str:
    """The rows, aligned, most expensive operators as they come in the model's order, and the totals."""
    head = ("GFLOP", "MB", "FLOP/B", "us each", "ms", "%")
    widths = (11, 11, 8, 10, 9, 6)
    titles = " ".join(f"{title:>{width}}" for title, width in zip(head, widths, strict=True))
    lines = [f"{'operator':<28} {'count':>5} {titles}  bound"]
    for row in estimate.rows:
        share = row.duration_s / estimate.duration_s
        moved = row.hbm_bytes + row.message_bytes
        intensity = "-" if row.work.message else f"{row.intensity:.1f}"
        lines.append(
            f"{row.name:<28} {row.count:>5.4g} {row.flops / 1e9:>11.2f} {moved / 1e6:>11.2f} {intensity:>8} "
            f"{row.time.duration_s * 1e6:>10.1f} {row.duration_s * 1e3:>9.3f} {share:>6.1%}  {row.bound_and_link}"
        )
    bubbles = estimate.pipeline.bubble_share * estimate.duration_s if estimate.pipeline is not None else 0.0
    shown = estimate.duration_s - estimate.device_s - bubbles
    if shown > 0:
        lines.append(f"{'host time that shows':<66} {'':>10} {shown * 1e3:>9.3f}")
    if bubbles:
        lines.append(f"{'pipeline bubbles':<66} {'':>10} {bubbles * 1e3:>9.3f}")
    shares = ", ".join(f"{bound} {share:.0%}" for bound, share in estimate.bound_share.items() if share >= 0.005)
    lines.append(
        f"step {estimate.duration_s * 1e3:.3f} ms ({estimate.origin}): {estimate.flops / 1e12:.4f} TFLOP, "
        f"{estimate.hbm_bytes / 1e9:.3f} GB, {estimate.num_kernels} kernels, MFU {estimate.mfu:.1%}, "
        f"MBU {estimate.mbu:.1%}; bound: {shares}"
    )
    return "\n".join(lines)
