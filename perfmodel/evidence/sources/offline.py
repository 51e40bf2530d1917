"""Recorded offline throughput as scenarios: TensorRT-LLM with all requests sent at once, or one static batch.

Two kinds of tables, recognised by their columns:

    in-flight batching   output tokens/s of a saturated engine, prompts and answers of fixed lengths
    static batches       one batch of `batch_size`, computed from its prompts to its last tokens: output tokens/s, or
                         with one output token the time to it (`ttft_ms`)

How the engine ran, where the tables do not say: TensorRT-LLM's defaults of that time, up to 2,048 sequences, 8,192
tokens in a step of in-flight batching (more where a whole prompt beside them needs it), KV in FP8 where weights are.
How many requests were sent is not recorded either; they were many enough for a saturated engine, and that is what is
simulated. Static batches are those of its C++ session: no server in front.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import numpy as np

from perfmodel.cost import EngineProfile, ServerFit, plan_memory, profile_of
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import MALFORMED, incomplete, over_cores, recorded_engine
from perfmodel.files.bounded import read_rows
from perfmodel.models.number_formats import with_quantization
from perfmodel.models.spec import ModelSpec
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs import Arrivals, EngineSpec, HardwareSpec, Lengths, Scenario, Traffic, load_hardware, load_model

Entry = Mapping[str, str]

_ENGINE = "trtllm"  # that such tables are of
_MOST_SEQUENCES = 2048
_TOKEN_BUDGET = 8192
_IN_FLIGHT = {"model", "gpu", "precision", "tp", "isl", "osl", "throughput_out_tok_s_gpu"}
_STATIC = {"model", "gpu", "precision", "tp", "isl", "osl", "batch_size", "metric", "value"}
_QUANTIZATION = {"FP8": "fp8", "FP16": None, "BF16": None}
_METRICS = {"throughput_out_tok_s_gpu": "throughput", "ttft_ms": "ttft"}
Progress = Callable[[int, int], None]
_KV_OF_FREE = 0.9  # kv_cache_free_gpu_mem_fraction's default
_ROUNDS = 3  # of requests: one that begins together, one counted, one that still runs


@dataclass(frozen=True)
class OfflineRun:
    """One row. `metric`: throughput (output tokens/s and device), or ttft (ms); `measured` in its unit.

    is_saturated: more requests wait than run, all the time; else the scenario's requests are all there were
    """

    row_id: str
    scenario: Scenario
    metric: str
    measured: float
    is_saturated: bool

    @property
    def lengths(self) -> str:
        """Tokens in and out."""
        inputs, outputs = self.scenario.traffic.input_tokens, self.scenario.traffic.output_tokens
        assert inputs is not None
        assert outputs is not None
        return f"{inputs.value:,} in, {outputs.value:,} out"

    @property
    def label(self) -> str:
        """The row as text."""
        scenario = self.scenario
        weights = scenario.model.quantization.weights or scenario.model.dtype
        batch = "" if self.is_saturated else f", batch {scenario.traffic.num_requests}"
        tp = scenario.engine.tensor_parallel_size
        return f"{scenario.model.name} {weights} on {tp} x {scenario.hardware.name}, {self.lengths}{batch}"


def read_offline_runs(path: str | Path) -> tuple[list[OfflineRun], list[tuple[str, str]]]:
    """(rows that can be described as scenarios, (row, reason) for those that cannot), of a CSV or a folder of them.

    Raises SpecError for what cannot be read, or is neither kind of table.
    """
    path = Path(path)
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise SpecError(f"{path}: has no .csv file; give one, or a folder of them.")
    rows: list[OfflineRun] = []
    left_out: list[tuple[str, str]] = []
    for file in files:
        for number, entry in enumerate(_entries(file), 2):
            name = f"{file.name}:{number}"
            try:
                rows.append(_static(name, entry) if "batch_size" in entry else _in_flight(name, entry))
            except PerfmodelError as error:
                left_out.append((name, str(error)))
            except MALFORMED as error:
                left_out.append((name, incomplete(error)))
    return rows, left_out


def _entries(file: Path) -> Sequence[Entry]:
    try:
        entries = read_rows(file)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = set(entries[0]) if entries else set()
    if not (found >= _IN_FLIGHT or found >= _STATIC):
        raise SpecError(
            f"{file}: expected a CSV of throughputs with columns {', '.join(sorted(_IN_FLIGHT))}; or, of static "
            f"batches, {', '.join(sorted(_STATIC))}."
        )
    return entries


def _in_flight(name: str, entry: Entry) -> OfflineRun:
    model, hardware = _served(entry)
    inputs, outputs = int(entry["isl"]), int(entry["osl"])
    sizes = {
        "max_num_seqs": _MOST_SEQUENCES,
        "max_num_batched_tokens": max(_TOKEN_BUDGET, inputs + _MOST_SEQUENCES),
        "max_model_len": inputs + outputs,
    }
    engine = _engine(entry, hardware, sizes)
    scenario = Scenario(
        name=name, model=model, hardware=hardware, engine=engine, traffic=_at_once(_MOST_SEQUENCES, inputs, outputs)
    )
    return OfflineRun(name, scenario, "throughput", float(entry["throughput_out_tok_s_gpu"]), True)


def _static(name: str, entry: Entry) -> OfflineRun:
    model, hardware = _served(entry)
    inputs, outputs, batch = (int(entry[key]) for key in ("isl", "osl", "batch_size"))
    sizes = {
        "batching": "static",
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(batch * inputs, _TOKEN_BUDGET),
        "max_model_len": inputs + outputs,
    }
    engine = _engine(entry, hardware, sizes)
    scenario = Scenario(
        name=name, model=model, hardware=hardware, engine=engine, traffic=_at_once(batch, inputs, outputs)
    )
    return OfflineRun(name, scenario, _METRICS[entry["metric"]], float(entry["value"]), False)


def _served(entry: Entry) -> tuple[ModelSpec, HardwareSpec]:
    model = load_model(entry["model"])
    quantization = _QUANTIZATION[entry["precision"]]
    return (model if quantization is None else with_quantization(model, quantization)), load_hardware(entry["gpu"])


def _engine(entry: Entry, hardware: HardwareSpec, sizes: Mapping[str, object]) -> EngineSpec:
    arguments = {
        "tensor_parallel_size": int(entry["tp"]),
        "dtype": "float16",
        "kv_cache_dtype": "fp8" if entry["precision"] == "FP8" else "auto",
        "enable_prefix_caching": False,
        "async_scheduling": False,
        **sizes,
    }
    return recorded_engine(_ENGINE, entry.get("trtllm_version") or "", hardware, arguments)


def _at_once(count: int, inputs: int, outputs: int) -> Traffic:
    return Traffic(
        arrivals=Arrivals(process="burst"),
        num_requests=count,
        input_tokens=Lengths(distribution="fixed", value=inputs),
        output_tokens=Lengths(distribution="fixed", value=outputs),
    )


@dataclass(frozen=True)
class OfflinePair:
    """One row with its prediction, in the row's unit; None and a reason where it could not be simulated.

    batch:    sequences that run together at most
    interval: the ends of the 80 % interval, as factors of the predicted value
    """

    row: OfflineRun
    predicted: float | None = None
    reason: str = ""
    batch: int = 0
    interval: tuple[float, float] = (nan, nan)


def simulate_offline_runs(rows: Sequence[OfflineRun], progress: Progress | None = None) -> list[OfflinePair]:
    """Predictions of all rows, over the cores of this machine."""
    return over_cores(_simulated, rows, lambda row: _server(row.scenario), progress)


def _server(scenario: Scenario) -> tuple[str, str, str, int]:
    weights = str(scenario.model.quantization.weights)
    return scenario.model.name, weights, scenario.hardware.name, scenario.engine.tensor_parallel_size


def _simulated(row: OfflineRun) -> OfflinePair:
    try:
        row = replace(row, scenario=_with_kv_of_the_free(row.scenario))
        if row.is_saturated:
            return _of_a_queue(row, _most_together(row.scenario))
        return _of_a_batch(row)
    except PerfmodelError as error:
        return OfflinePair(row, reason=str(error))


def _of_a_queue(row: OfflineRun, batch: int) -> OfflinePair:
    """Output tokens per second and device of an engine that always has a full batch.

    Requests are alike, so each round of them follows the one before as that followed its own: the second is as all
    later ones, within 1.5 % of what 25 rounds come to (ten rows).
    """
    count = _ROUNDS * batch + 1
    requests, interval = _run(row.scenario.model_copy(update={"traffic": _with_requests(row.scenario, count)}))
    ends = np.sort(requests.finished_s)
    duration = float(ends[2 * batch] - ends[batch])
    outputs = batch * float(requests.num_output_tokens.mean())
    return OfflinePair(row, outputs / duration / row.scenario.engine.num_devices, "", batch, _inverse(interval))


def _of_a_batch(row: OfflineRun) -> OfflinePair:
    """Output tokens per second and device, or ms to the first token, of one batch."""
    engine = profile_of(row.scenario.engine)
    requests, interval = _run(row.scenario, engine.model_copy(update={"server": ServerFit()}))
    if row.metric == "ttft":
        return OfflinePair(row, float(requests.ttft_s.mean()) * 1e3, "", len(requests), interval)
    duration = float(requests.finished_s.max() - requests.arrival_s.min())
    rate = float(requests.num_output_tokens.sum()) / duration / row.scenario.engine.num_devices
    return OfflinePair(row, rate, "", len(requests), _inverse(interval))


def _run(scenario: Scenario, profile: EngineProfile | None = None) -> tuple[RequestColumns, tuple[float, float]]:
    """The requests' records, and the 80 % interval of the run's duration as factors."""
    result = simulate(scenario, profile=profile, keep_steps=False, intervals=True)
    assert result.requests is not None
    return result.requests, result.ensemble.duration_factor() if result.ensemble is not None else (nan, nan)


def _inverse(interval: tuple[float, float]) -> tuple[float, float]:
    low, high = interval
    return 1 / high, 1 / low


def _with_kv_of_the_free(scenario: Scenario) -> Scenario:
    """KV gets a share of what weights and activations leave free, as in TensorRT-LLM, not of the whole memory."""
    whole = scenario.engine.model_copy(update={"gpu_memory_utilization": 1.0})
    plan = plan_memory(scenario.model, scenario.hardware, whole)
    used = 1 - (1 - _KV_OF_FREE) * plan.kv_bytes / plan.visible_bytes
    return scenario.model_copy(update={"engine": whole.model_copy(update={"gpu_memory_utilization": used})})


def _with_requests(scenario: Scenario, count: int) -> Traffic:
    return scenario.traffic.model_copy(update={"num_requests": count})


def _most_together(scenario: Scenario) -> int:
    """Sequences of the scenario's fixed lengths that the KV cache holds whole, up to max_num_seqs."""
    tokens = scenario.engine.max_model_len
    assert tokens is not None  # the reader sets it to the lengths of the row
    plan = plan_memory(scenario.model, scenario.hardware, scenario.engine)
    return max(min(plan.max_batch(tokens), scenario.engine.max_num_seqs), 1)
