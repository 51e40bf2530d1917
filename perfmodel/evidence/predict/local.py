"""Recorded figures beside predictions: each row as a scenario, priced by the steps that the simulator would take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from perfmodel.cost.calibrations.backends import BackendFits, backend_calibration
from perfmodel.cost.calibrations.draws import LogNormal
from perfmodel.cost.steps.pricer import StepPricer
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import PerfmodelError
from perfmodel.evidence.sources.local import DeviceTable, LocalRow, Test, local_model, local_scenario, row_tests
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario

Progress = Callable[[int, int], None]
_NOT_OF_A_SETTING = {"row_id": "", "tokens_per_s": 1.0, "flags": "", "group": "", "source": ""}
_UNKNOWN_SHAPE = 1.3  # how much wider the interval of a model without a card is
_P90 = 1.2816  # of a standard normal: the half-width of an 80 % interval


@dataclass(frozen=True)
class LocalPair:
    """A figure and what was predicted for it; nan and the reason where it could not be.

    interval: 80 % of the figures, as factors of the prediction; is_known: the model has a card
    """

    row: LocalRow
    hardware: HardwareSpec | None
    predicted: float
    interval: tuple[float, float] = (float("nan"), float("nan"))
    is_known: bool = False
    scenario: Scenario | None = None
    reason: str = ""


def predict_rows(
    rows: Sequence[LocalRow], folder: Path, progress: Progress | None = None, fits: BackendFits | None = None
) -> list[LocalPair]:
    """A prediction for each row; settings that several rows share are priced once.

    folder: where `devices.csv` is; fits: in place of those of the engines' files
    """
    table = DeviceTable(folder)
    known: dict[LocalRow, LocalPair] = {}
    pairs = []
    for number, row in enumerate(rows):
        setting = replace(row, **_NOT_OF_A_SETTING)  # type: ignore[arg-type]  # of several types
        if setting not in known:
            known[setting] = _predicted(setting, table, fits)
        pairs.append(replace(known[setting], row=row))
        if progress is not None:
            progress(number + 1, len(rows))
    return pairs


def _predicted(row: LocalRow, table: DeviceTable, fits: BackendFits | None) -> LocalPair:
    hardware = None
    try:
        hardware = table.device(row.device, row.device_class)
        model = local_model(row.model, row.params, row.active_params, row.gguf_type, row.file_size_bytes)
        scenario = local_scenario(row, model, hardware)
        calibration = backend_calibration(hardware, scenario.engine, fits)
        pricer = step_costs(scenario, calibration).pricer()
        tests = row_tests(row, scenario.model.attention_spans, scenario.engine.max_num_batched_tokens)
        rate = sum(map(partial(_rate, pricer), tests)) / len(tests)
    except PerfmodelError as error:
        return LocalPair(row, hardware, float("nan"), reason=str(error))
    residuals = calibration.prompt_residuals if row.test == "pp" else calibration.step_residuals
    spread = calibration.spread * (1.0 if model.is_known else _UNKNOWN_SHAPE)
    return LocalPair(row, hardware, rate, _interval(LogNormal.of(residuals, spread)), model.is_known, scenario)


def _rate(pricer: StepPricer, test: Test) -> float:
    """Tokens per second."""
    return test.tokens * PS_PER_S / sum(pricer.price(shape) for shape in test.shapes)


def _interval(seconds: LogNormal) -> tuple[float, float]:
    """The interval of a rate, which is low where the seconds are high."""
    return 1.0 / seconds.at(_P90), 1.0 / seconds.at(-_P90)
