"""Reads the files of a measured device, `reports/measured/<device>/`, written by the executor's suite.

    suite.json     device, driver, versions, commit; ceilings, clocks, power, temperature; calls, what ran and what the
                   budget left out
    smoke.json     a record per check: does it run, is it right
    kernels.json   a record per operator and problem: time, baseline, largest difference to the reference
    steps.json     a record per model and whole-step shape
    serving.json   a record per scenario: each request, and each step with its shape
    pairs.json     the same with and without a technique: "<file> with", "<file> without"

Times are in seconds, of the device (a CPU: of the measuring thread)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import first_problem
from perfmodel.files.base import Spec
from perfmodel.files.sandbox import read_json
from perfmodel.files.units import FlopsPerSecond, PositiveFloat
from perfmodel.ops.work import BatchShape

FILES = ("suite.json", "smoke.json", "kernels.json", "steps.json", "serving.json", "pairs.json")

SIDES = ("with", "without")  # the technique

Size = int | float | str
_BEYOND_CACHES_MIB = 256  # the L2 of a B200 has 126


class Ceilings(Spec):
    """What the device can do at best, measured: the figures that achieved rates are held against.

    copy_bytes_per_s:  bytes read and written per second by a copy, by MiB copied
    gemm_flops_per_s:  rate of a library's square product by number format and side
    launch_s:          one launch in a stream of empty kernels; graph_launch_s: of one kernel in a replayed graph"""

    copy_bytes_per_s: dict[str, PositiveFloat] = Field(default_factory=dict)
    gemm_flops_per_s: dict[str, dict[str, FlopsPerSecond]] = Field(default_factory=dict)
    launch_s: float | None = None
    graph_launch_s: float | None = None

    @property
    def bandwidth(self) -> float | None:
        """Byte/s of a copy beyond all caches: the best such, or that of the largest copy."""
        beyond = [rate for mib, rate in self.copy_bytes_per_s.items() if int(mib) >= _BEYOND_CACHES_MIB]
        largest = max(self.copy_bytes_per_s, key=int, default=None)
        return max(beyond, default=None) or (self.copy_bytes_per_s[largest] if largest is not None else None)

    def rate(self, dtype: str) -> float | None:
        """Best measured rate in `dtype`, FLOP/s."""
        return max(self.gemm_flops_per_s.get(dtype, {}).values(), default=None)


class DeviceReadings(Spec):
    """A device while it was measured, reading by reading: `at_s` seconds of measuring, clocks in MHz, watts, degrees
    Celsius. `absent`: why a field has none."""

    at_s: tuple[float, ...] = ()
    sm_clock_mhz: tuple[float, ...] = ()
    memory_clock_mhz: tuple[float, ...] = ()
    power_w: tuple[float, ...] = ()
    power_limit_w: tuple[float, ...] = ()
    temperature_c: tuple[float, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)


class SuiteCall(Spec):
    """One call of the programme.

    spent_s:       seconds by part
    num_processes: in which it measured, one after the other: another one follows each that a task has ended
    compile_s:     seconds in which they compiled `num_compiled` kernels; others had compiled `num_compiled_ahead`"""

    date: str
    command: str
    commit: str = ""
    elapsed_s: float = 0.0
    spent_s: dict[str, float] = Field(default_factory=dict)
    num_processes: int = 1
    compile_s: float = 0.0
    num_compiled: int = 0
    num_compiled_ahead: int = 0


class SuiteInfo(Spec):
    """Source of a suite's measurements.

    device:      name of the hardware file, or what the driver calls a device without one
    elapsed_s:   of all calls
    parts_done:  tasks measured, by part; left_out: keys of tasks that the budget did not reach"""

    device: str
    device_name: str = ""
    kernels: str = "torch"  # which implementations ran: torch | triton
    versions: dict[str, str] = Field(default_factory=dict)
    commit: str = ""
    date: str = ""
    command: str = ""
    elapsed_s: float = 0.0
    reference_s: float | None = None  # of the step that says how fast a shared machine is; all times are at its speed
    ceilings: Ceilings = Ceilings()
    parts_done: dict[str, int] = Field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    failures: dict[str, str] = Field(default_factory=dict)
    tiles: dict[str, str] = Field(default_factory=dict)  # what the tuner chose
    untuned: dict[str, str] = Field(default_factory=dict)  # measured with first tiles, since tuning broke the device
    readings: DeviceReadings = DeviceReadings()
    calls: tuple[SuiteCall, ...] = ()


class SmokeCheck(Spec):
    """One check. `error`: the largest difference, over the largest magnitude (kernel), of logits (parity), or the share
    of other tokens (graphs); `wall_s`: seconds with all that was compiled meanwhile."""

    kind: str
    error: float
    tolerance: float
    wall_s: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance


class BaselineTime(Spec):
    """A library call on the same inputs. `is_eager`: it could not be captured, so that the host's launches show."""

    seconds: PositiveFloat
    is_eager: bool = False


class KernelRecord(Spec):
    """One operator on one problem.

    is_eager:   the kernel could not be captured in a graph, so that the host's launches show
    baselines:  library calls on the same inputs by name (attention: each backend of SDPA); baseline_s: the fastest
    error:      largest difference to the reference over its largest magnitude"""

    operator: str
    sizes: dict[str, Size]
    seconds: PositiveFloat
    p10_s: PositiveFloat
    p90_s: PositiveFloat
    flops: float = 0.0
    bytes: float = 0.0
    rate: str = "bf16"
    is_eager: bool = False
    baseline_s: float | None = None
    baselines: dict[str, BaselineTime] = Field(default_factory=dict)
    error: float | None = None
    tolerance: float | None = None

    @property
    def label(self) -> str:
        return f"{self.operator} " + " ".join(f"{name}={value}" for name, value in self.sizes.items())


class MeasuredStep(Spec):
    """One shape of a step of one model. `shape`: the fields of a BatchShape; `overrides`: of the suite's scenario;
    `joules`: of the device, None: not counted."""

    model: str
    overrides: tuple[str, ...] = ()
    shape: dict[str, Any]
    seconds: PositiveFloat
    p10_s: PositiveFloat
    p90_s: PositiveFloat
    is_graphed: bool = False
    joules: PositiveFloat | None = None

    @property
    def batch(self) -> BatchShape:
        """The shape as a `BatchShape`."""
        return shape_of(self.shape)

    @property
    def label(self) -> str:
        shape = self.batch
        prompts = f", prompts {'+'.join(str(new) for new, _ in shape.prefills)}" if shape.prefills else ""
        return f"{self.model}: {shape.num_decodes} decodes with {shape.decode_context} tokens of context{prompts}"


class StepSeries(Spec):
    """The steps of a run, column by column: shapes (fields of a BatchShape in order) and seconds."""

    shapes: tuple[tuple[Any, ...], ...]
    seconds: tuple[PositiveFloat, ...]


class ServingRecord(Spec):
    """A scenario served for real: its requests column by column, and its steps."""

    scenario: str
    overrides: tuple[str, ...] = ()
    requests: dict[str, tuple[float, ...]]
    steps: StepSeries
    summary: dict[str, Any] = Field(default_factory=dict)


def shape_of(fields: Mapping[str, Any]) -> BatchShape:
    """A BatchShape from its JSON form."""
    values = dict(fields)
    values["prefills"] = tuple((int(new), int(done)) for new, done in values.get("prefills", ()))
    for name in ("decode_windowed", "drafting"):
        values[name] = tuple(values.get(name, ()))
    return BatchShape(**values)


@dataclass(frozen=True)
class Measurements:
    """All measurements of one device."""

    folder: Path
    info: SuiteInfo
    kernels: tuple[KernelRecord, ...]
    steps: tuple[MeasuredStep, ...]
    serving: tuple[ServingRecord, ...]  # those on vLLM included
    smoke: Mapping[str, SmokeCheck] = field(default_factory=dict)
    pairs: Mapping[str, ServingRecord] = field(default_factory=dict)


def read_measurements(folder: str | Path) -> Measurements:
    """The files in `folder`; missing parts are empty. Raises SpecError without `suite.json`, and for invalid files."""
    root = Path(folder)
    if not (root / "suite.json").is_file():
        raise SpecError(f"{root}: has no suite.json; expected what `python -m perfmodel_executors.gpu_suite` writes.")

    def read(name: str, kind: Any) -> dict[str, Any]:
        path = root / f"{name}.json"
        if not path.is_file():
            return {}
        try:
            data = read_json(path)
            return {"": kind(**data)} if kind is SuiteInfo else {key: kind(**row) for key, row in data.items()}
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
        except ValidationError as error:
            problem = first_problem(error)
        except (ValueError, TypeError, AttributeError) as error:
            problem = str(error).splitlines()[0]
        raise SpecError(f"{path}: {problem}; expected a file of the measuring programme.")

    return Measurements(
        root,
        read("suite", SuiteInfo)[""],
        tuple(read("kernels", KernelRecord).values()),
        tuple(read("steps", MeasuredStep).values()),
        tuple(run for part in ("serving", "vllm") for run in read(part, ServingRecord).values()),
        read("smoke", SmokeCheck),
        read("pairs", ServingRecord),
    )
