"""Host time in a step, and how much of it is exposed.

    t_step = serial + max( hidden, device )

`serial` parts are always exposed; `hidden` parts overlap with the device."""

from typing import Protocol

from perfmodel.cost.calibrations.calibration import EAGER_OPERATOR_S, HostFit
from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.tables import to_ps
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.work import BatchShape, Depends, decode_shape

# What comes once for a plan, and what comes with the layers of each stage.
_NOT_OF_STAGES = dict.fromkeys(
    ("serial_step_s", "serial_per_sequence_s", "hidden_step_s", "hidden_per_sequence_s", "prompt_step_s"), 0.0
)
_OF_STAGES = {name: 0.0 for name in HostFit.model_fields if name.startswith("hidden_prompt_")}


def step_seconds(serial: float, hidden: float, device: float) -> float:
    return serial + max(hidden, device)


def step_ticks(serial: int, hidden: int, device: int) -> int:
    return serial + (hidden if hidden > device else device)


class SharedCores(Protocol):
    """Cores for which processes wait."""

    def step(self, serial: int, hidden: int, num_samples: int) -> tuple[int, int]:
        """Picoseconds that serial and hidden work of a step takes there."""


class Host:
    """Host time of steps of `graph` on the device of `timer`, times `share`. draw: error factors, for ensembles"""

    def __init__(self, graph: StepGraph, timer: OperatorTimer, draw: Draw | None = None, share: float = 1.0) -> None:
        self.fit = host_fit(graph, timer)
        self._factor = share * draw.step if draw is not None else share
        self._prompt_factor = self._factor * draw.prompt if draw is not None else share
        self.prompt_s = self._prompt_factor * self.fit.prompt_step_s
        self._hidden_prompt_s = self._prompt_factor * self.fit.launches_s(*graph.launched_layers)
        self._prompt, self._hidden_prompt = to_ps(self.prompt_s), to_ps(self._hidden_prompt_s)
        self._captured = self.fit.captured_tokens
        encoders = (
            0 if graph.stages else sum(node.count for node in graph.by_depends[Depends.IMAGES])
        )  # never in graphs
        self._encoder_s = self._prompt_factor * load_overheads().engine_launch_s * encoders
        self.encoder = to_ps(self._encoder_s)
        self.cores: SharedCores | None = None  # None: each process has its own
        self.mask = to_ps(self._factor * self.fit.mask_s)
        self._known: list[tuple[int, int]] = []  # picoseconds, serial and hidden, by the number of sequences

    @property
    def launched_s(self) -> float:
        """Seconds until a step with prompts beyond the captured sizes is launched, beside `prompt_s`."""
        return sum(self._of(1)) + self._hidden_prompt_s

    def seconds(self, shape: BatchShape) -> tuple[float, float]:
        """Serial and hidden seconds of a step of `shape`."""
        serial, hidden = self._of(shape.num_decodes + len(shape.prefills))
        if shape.images:
            hidden += self._encoder_s
        hidden += self._num_masks(shape) * self._factor * self.fit.mask_s
        if shape.prefills and shape.num_tokens > self._captured:
            return serial + self.prompt_s, hidden + self._hidden_prompt_s
        return serial, hidden

    def ticks(self, shape: BatchShape) -> tuple[int, int]:
        """Serial and hidden picoseconds of a step of `shape`, without `encoder`, what it takes to launch an encoder,
        and `masks`."""
        num_sequences = shape.num_decodes + len(shape.prefills)
        if num_sequences >= len(self._known):
            for count in range(len(self._known), num_sequences + 1):
                serial, hidden = self._of(count)
                self._known.append((to_ps(serial), to_ps(hidden)))
        times = self._known[num_sequences]
        if shape.prefills and shape.num_tokens > self._captured:
            return times[0] + self._prompt, times[1] + self._hidden_prompt
        return times

    def masks(self, shape: BatchShape) -> int:
        """Picoseconds for the masks of answers of a required shape, made while the device computes."""
        return round(self._num_masks(shape) * self.mask)

    def _num_masks(self, shape: BatchShape) -> float:
        return shape.num_masks if shape.num_masks >= 0 else self.fit.mask_share * shape.num_samples

    def _of(self, num_sequences: int) -> tuple[float, float]:
        return self._factor * self.fit.serial_s(num_sequences), self._factor * self.fit.hidden_s(num_sequences)


def host_fit(graph: StepGraph, timer: OperatorTimer) -> HostFit:
    """The calibration's host time for this graph's steps.

    Without CUDA graphs (unless the host was measured so) kernels are launched one by one (`launch_seconds`); launches
    run ahead of the device and are exposed only if they take longer.

    With pipeline stages the engine's host plans each batch once, and a process per stage launches its layers: the whole
    graph has what comes once, a stage's graph what comes with layers and launches."""
    calibration = timer.calibration
    host = calibration.host
    if not graph.is_async:
        serial_s = host.serial_step_s + host.hidden_step_s
        serial_per_sequence_s = host.serial_per_sequence_s + host.hidden_per_sequence_s
        parts = {"serial_step_s": serial_s, "serial_per_sequence_s": serial_per_sequence_s}
        host = host.model_copy(update={**parts, "hidden_step_s": 0.0, "hidden_per_sequence_s": 0.0})
    if graph.stage_layers is not None:
        host = host.model_copy(update=_NOT_OF_STAGES)
    if graph.stages:
        host = host.model_copy(update=_OF_STAGES)
    else:
        host = host.model_copy(update={"hidden_step_s": host.hidden_step_s + launch_seconds(graph, timer)[0]})
    return host if calibration.host_overheads == 1.0 else host.times(calibration.host_overheads)


def launch_seconds(graph: StepGraph, timer: OperatorTimer) -> tuple[float, int]:
    """Host seconds to launch a decode step's kernels one by one, and their number; 0 seconds if CUDA graphs hold them,
    or the host was measured without.

    `OverheadFits.engine_launch_s` per call (`launching_calls`). Plain PyTorch modules take EAGER_OPERATOR_S each under
    any calibration, but not on a CPU, which computes in the same thread."""
    calibration = timer.calibration
    is_plain = graph.is_plain and timer.hardware.kind != "cpu"
    shape = decode_shape(1, 1, graph.model.attention_spans)
    num_kernels = sum(node.count * node.work(shape).num_kernels for node in graph.nodes)
    if is_plain:
        return EAGER_OPERATOR_S * num_kernels, num_kernels
    is_eager = graph.is_eager and (calibration.origin == "datasheet" or calibration.host.replays_graphs)
    return (load_overheads().engine_launch_s * launching_calls(graph) if is_eager else 0.0), num_kernels


def launching_calls(graph: StepGraph) -> int:
    """Python calls that launch a decode step's kernels: one per operator, whose C++ also launches quantization and
    combine kernels; experts' kernels are launched one by one."""
    shape = decode_shape(1, 1, graph.model.attention_spans)
    works = [(node.count, node.work(shape)) for node in graph.nodes]
    return sum(n * (work.num_kernels if work.family == "moe" else min(work.num_kernels, 1)) for n, work in works)
