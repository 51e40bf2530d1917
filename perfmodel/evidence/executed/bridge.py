"""Loads the executor package on demand: `perfmodel` never imports torch; `perfmodel_executors` imports `perfmodel`.
Without it, or without torch, users get a one-sentence error."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.errors import MissingExtraError
from perfmodel.evidence.executed.technique import TechniqueRun
from perfmodel.evidence.report import ValidationReport
from perfmodel.models.layer_formats import LayerQuantization
from perfmodel.ops.work import BatchShape
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.scenario import Scenario

Progress = Callable[[int, int | None], None]


class ExecutedBeside(Protocol):
    """A scenario's executed runs and its simulation; `problem` says why there are none."""

    runs: Sequence[RunResult]
    simulated: RunResult | None
    problem: str


class MeasuredQuality(Protocol):
    """Quality loss of a technique; as text, one line per number."""

    def to_json(self) -> dict[str, Any]: ...


class MeasuredSensitivity(MeasuredQuality, Protocol):
    """Quality loss of layers in fewer bits, and the proposed `engine.quantization_by_layer`."""

    rules: tuple[LayerQuantization, ...]


class ExecutorPackage(Protocol):
    """Functions of `perfmodel_executors`, documented there."""

    def calibrate_cpu(
        self, models: Sequence[str] | None = None, out: Path | None = None, progress: Progress | None = None
    ) -> tuple[Calibration, Path]: ...

    def calibrate_on(
        self, target: str, scenarios: Sequence[tuple[Scenario, str]], progress: Progress | None = None
    ) -> Calibration: ...

    def execute_scenario(
        self,
        scenario: Scenario,
        progress: Progress | None = None,
        out: Path | None = None,
        *,
        kernels: str | None = None,
        wrap: Callable[[Any, Scenario], Any] = ...,
        max_seconds: float | None = None,
        on_text: Callable[[int, str, str], None] | None = None,
    ) -> RunResult:
        """See `perfmodel_executors.execute_scenario`."""

    def execute_on(
        self, target: str, scenario: Scenario, model: str, progress: Progress | None = None, out: Path | None = None
    ) -> RunResult:
        """See `perfmodel_executors.execute_on`."""

    def execute_repeatedly(
        self, scenarios: Sequence[Scenario], rounds: int, progress: Progress | None = None
    ) -> Sequence["ExecutedBeside"]: ...

    def explain_occupancy(
        self, scenario: Scenario, shape: BatchShape, progress: Progress | None = None
    ) -> list[dict[str, Any]]: ...

    def measure_quality(
        self, scenario: Scenario, baseline: Scenario | None = None, text: str = "pydoc", chunk: int | None = None
    ) -> MeasuredQuality:
        """See `perfmodel_executors.measure_quality`."""

    def measure_sensitivity(
        self,
        scenario: Scenario,
        method: str,
        group_size: int | None = None,
        bits: float | None = None,
        text: str = "pydoc",
        by_block: bool = False,
        progress: Progress | None = None,
    ) -> "MeasuredSensitivity":
        """See `perfmodel_executors.measure_sensitivity`."""

    def measure_technique(
        self, scenario: Scenario, baseline: Scenario, metric: str, repeats: int = 1
    ) -> list[TechniqueRun]:
        """See `perfmodel_executors.measure_technique`."""

    def validate_executor(
        self, scenario: Scenario, repeats: int = 1, progress: Progress | None = None
    ) -> ValidationReport: ...


def load_executor(*, needs_torch: bool = True) -> ExecutorPackage:
    """The executor package. Raises MissingExtraError if it or torch is not installed. needs_torch: False for runs on
    another engine, which brings its own"""
    for name in ("torch", "perfmodel_executors") if needs_torch else ("perfmodel_executors",):
        if find_spec(name) is None:
            raise MissingExtraError(
                f"executing needs {name}, which is not installed: pip install '.[executor]' in the checkout "
                f"(on a machine without a GPU, choose the CPU build of torch)."
            )
    return cast(ExecutorPackage, import_module("perfmodel_executors"))


def explain_occupancy(scenario: Scenario, shape: BatchShape, progress: Progress | None = None) -> list[dict[str, Any]]:
    """See `ExecutorPackage.explain_occupancy`; also needs triton."""
    executor = load_executor()
    if find_spec("triton") is None:
        raise MissingExtraError("compiling kernels needs triton, which is not installed: pip install triton.")
    return executor.explain_occupancy(scenario, shape, progress=progress)
