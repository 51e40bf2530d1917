"""`Observation`: one measured result from any publisher; `Prediction`: its prediction. Readers (`sources`) make
observations; `predictions_of` predicts each once, on all cores."""

import csv
import gzip
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from perfmodel.cores import num_processes
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.sandbox import read_rows
from perfmodel.sim import RunResult
from perfmodel.specs import EngineSpec, HardwareSpec, Scenario
from perfmodel.specs.engine.devices import with_defaults
from perfmodel.specs.engine.versions import parse_version

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Interval = tuple[float, float]
Progress = Callable[[int, int], None]
Entry = Mapping[str, str]
Reasons = list[tuple[str, str]]  # (row, why it is not covered)
RowT = TypeVar("RowT")
PairT = TypeVar("PairT")
KeyT = TypeVar("KeyT")
NO_INTERVAL: Interval = (float("nan"), float("nan"))
# Errors from converting an entry of another type.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_LONGEST_CHUNK = 48


@dataclass(frozen=True)
class RequestTimes:
    """Answered requests in sending order, one entry each. start_s: relative to the first; None if unknown. ttft_s: nan
    without streaming"""

    start_s: Floats | None
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    ttft_s: Floats
    e2el_s: Floats

    def __len__(self) -> int:
        return len(self.e2el_s)

    def scaled(self, factor: float) -> "RequestTimes":
        """The same requests with all times multiplied by `factor`."""
        start_s = None if self.start_s is None else self.start_s * factor
        return replace(self, start_s=start_s, ttft_s=self.ttft_s * factor, e2el_s=self.e2el_s * factor)

    @property
    def tpot_s(self) -> Floats:
        """nan for answers of one token."""
        later, nans = self.num_output_tokens - 1, np.full(len(self), np.nan)
        tpot_s: Floats = np.divide(self.e2el_s - self.ttft_s, later, out=nans, where=later > 0)
        return tpot_s


@dataclass(frozen=True)
class Observation:
    """One measured result.

    setup:       what ran: a scenario, or the parts of one
    load:        arrivals, if the setup has none
    metrics:     measured values by name, in the metric's unit; requests: single requests, if logged
    label:       the row as text, default: its name
    labels:      dimension -> the row's group; groups: others named by the source
    group:       shared by rows of one setting
    source:      publisher or tool; flags: the source's caveats
    is_reliable: figures count without caveats
    trivial:     metric -> the simplest prediction, where it is known: the benchmark's limit, a roofline
    window:      arrival interval in seconds, for runs with several stages"""

    name: str
    setup: Any
    metrics: Mapping[str, float]
    requests: RequestTimes | None = None
    load: Any = None
    label: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    group: str = ""
    source: str = ""
    flags: str = ""
    is_reliable: bool = True
    trivial: Mapping[str, float] = field(default_factory=dict)
    window: tuple[float, float] | None = None

    @property
    def scenario(self) -> Scenario:
        """The setup, of a source that describes it completely."""
        assert isinstance(self.setup, Scenario)
        return self.setup

    @property
    def is_overloaded(self) -> bool:
        """Whether answers are so late that a backlog must have grown."""
        return self.metrics["ttft_mean"] > 0.5 * self.metrics["e2el_mean"]

    def under(self, scenario: Scenario) -> "Observation":
        """The row with another scenario."""
        return replace(self, setup=scenario)


@dataclass(frozen=True)
class Prediction:
    """A prediction for an observation, or the reason for none.

    metrics:   predicted, by name; intervals: 80 % intervals as factors of these
    requests:  metric -> seconds of each request, nan if refused
    scenario:  simulated or priced; is_known: its model has a card
    details:   further facts for a report"""

    row: Observation
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    requests: Mapping[str, Floats] = field(default_factory=dict)
    scenario: Scenario | None = None
    is_known: bool = True
    result: RunResult | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def predictions_of(
    rows: Sequence[Observation],
    work: Callable[[Observation], Prediction],
    key: Callable[[Observation], Hashable],
    alike: Callable[[Observation], Any],
    progress: Progress | None = None,
) -> list[Prediction]:
    """Map `work` over `rows` on all cores, in order; rows with one `key` are predicted once. work: picklable; a
    PerfmodelError becomes the reason; alike, progress: see `parallel_map`"""
    keys = [key(row) for row in rows]
    distinct = dict(zip(reversed(keys), reversed(rows), strict=True))
    predicted = parallel_map(partial(_reasoned, work), list(distinct.values()), alike, progress)
    result = dict(zip(distinct, predicted, strict=True))
    return [replace(result[item], row=row) for item, row in zip(keys, rows, strict=True)]


def _reasoned(work: Callable[[Observation], Prediction], row: Observation) -> Prediction:
    try:
        return work(row)
    except PerfmodelError as error:
        return Prediction(row, reason=str(error))


def parallel_map(
    work: Callable[[RowT], PairT], rows: Sequence[RowT], alike: Callable[[RowT], Any], progress: Progress | None = None
) -> list[PairT]:
    """Map the picklable `work` over `rows` on all cores, in order. alike: rows with one key run mostly equal steps and
    are placed together to share their costs; progress: called with (rows done, in all)"""
    order = sorted(range(len(rows)), key=lambda i: alike(rows[i]))
    with ProcessPoolExecutor(num_processes(len(rows))) as pool:
        chunk = min(_LONGEST_CHUNK, max(len(rows) // 32, 1))
        pairs = pool.map(work, [rows[i] for i in order], chunksize=chunk)
        result = dict(reported(zip(order, pairs, strict=True), len(rows), progress))
    return [result[i] for i in range(len(rows))]


def reported(items: Iterable[RowT], total: int, progress: Progress | None) -> Iterator[RowT]:
    """`items`, of which there are `total`: `progress` is called after each, with how many are done."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, total)


def grouped(pairs: Iterable[tuple[KeyT, RowT]]) -> dict[KeyT, list[RowT]]:
    """key -> its values, both in the order of the (key, value) `pairs`."""
    groups: dict[KeyT, list[RowT]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


# ---------------------------------------------------------------- reading


def described(entries: Iterable[tuple[str, Any]], row_of: Callable[[str, Any], RowT]) -> tuple[list[RowT], Reasons]:
    """(results of `row_of` over (name, entry) pairs, (name, reason) of failures)"""
    rows: list[RowT] = []
    left_out: Reasons = []
    for name, entry in entries:
        try:
            rows.append(row_of(name, entry))
        except PerfmodelError as error:
            left_out.append((name, str(error)))
        except MALFORMED as error:
            is_key = isinstance(error, KeyError)
            what = f"{error.args[0]!r} is missing, or is none of the known values." if is_key else error
            left_out.append((name, f"its description is incomplete: {what}"))
    return rows, left_out


def first_problem(error: ValidationError) -> str:
    """Where, and what is wrong there."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def named(entries: Iterable[Entry]) -> Iterable[tuple[str, Entry]]:
    """Rows of a table by id, else line number."""
    return ((entry.get("id") or f"line {number}", entry) for number, entry in enumerate(entries, 2))


def table_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV, plain or gzipped. Raises SpecError if unreadable."""
    try:
        return read_rows(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def lenient_rows(path: str | Path, needed: Sequence[str], what: str) -> list[dict[str, str]]:
    """Rows of a hand-written CSV: cells are stripped, lines may be short. needed: required columns; what: name of the
    table. Raises SpecError for another file."""
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"{file}: no such file.")
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise SpecError(f"{file}: is no table of {what}: column {missing[0]} is missing.")
            return [
                {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)} for row in reader
            ]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{file}: cannot be read as a table ({error}).") from None


# ---------------------------------------------------------------- where measurements come from


@dataclass(frozen=True, slots=True)
class Origin:
    """A kind of recorded measurements, its publisher and licence. Calibrations name no file or model, since they apply
    to any workload of the device."""

    kind: str
    publisher: str

    def source(self, what: str) -> str:
        """`what`, such as "1,000 kernel times", and who measured it."""
        return f"{what} published by {self.publisher}"

    def command(self, flags: str) -> str:
        """The command that fits measurements of this kind, with these flags."""
        return f"perfmodel calibrate --from <{self.kind}> {flags}"


KERNEL_TABLES = Origin("kernel tables", "ai-dynamo/aiconfigurator (Apache-2.0)")
LAYER_PROFILE = Origin("layer profile", "casys-kaist/LLMServingSim (MIT)")
MEASURED_POWER = Origin("measured power", "ml-energy/leaderboard")
SERVING_RUNS = Origin("serving runs", "inference-sim/sim-to-real-accuracy-validation")
PUBLISHED_RESULTS = Origin("serving results", "MLCommons (Apache-2.0), ROCm/vllm (Apache-2.0), Intel and others")
ACCEPTED_LENGTHS = Origin(
    "accepted lengths",
    "SemiAnalysisAI/InferenceX, vLLM and speculators (Apache-2.0), AQ-MedAI (MIT) and Nebius (CC-BY-4.0)",
)
BATCHES = Origin("static batches", "argonne-lcf/LLM-Inference-Bench (BSD-3-Clause)")
STEADY_STATES = Origin("steady states", "ai-dynamo/aiconfigurator, silicon samples (Apache-2.0)")

# Records without a version, or with the name of a build alone, are of the first half of 2026: what was current then.
_CURRENT = {"vllm": "0.19.0", "sglang": "0.5.9", "trtllm": "1.2.0"}


def recorded_engine(profile: str, version: str, hardware: HardwareSpec, arguments: Mapping[str, Any]) -> EngineSpec:
    """The engine as it ran.

    profile:   its name in hardware_specs/engines
    version:   as recorded, or ""; unknown ones get the nearest version's facts, and wider intervals
               (`perfmodel.cost.scenario_fits`)
    hardware:  the devices it ran on
    arguments: recorded ones of `EngineSpec`"""
    stated = recorded_version(profile, version)
    return with_defaults(EngineSpec(**{**arguments, "profile": profile, "version": stated}), hardware)


def recorded_version(profile: str, version: str) -> str | None:
    """The version as recorded, else what was current. profile: the engine's name"""
    try:
        is_numbered = bool(parse_version(version)[0])
    except SpecError:
        is_numbered = False
    return version if is_numbered else _CURRENT.get(profile)
