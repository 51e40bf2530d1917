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

__all__ = ["OfflineRun", "read_offline_runs"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfmodel.calibrate.origins import recorded_engine
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.bounded import read_rows
from perfmodel.models.formats.quantization import with_quantization
from perfmodel.models.spec import ModelSpec
from perfmodel.specs import Arrivals, EngineSpec, HardwareSpec, Lengths, Scenario, Traffic, load_hardware, load_model

Entry = Mapping[str, str]

_ENGINE = "trtllm"  # that such tables are of
_MOST_SEQUENCES = 2048
_TOKEN_BUDGET = 8192
_IN_FLIGHT = {"model", "gpu", "precision", "tp", "isl", "osl", "throughput_out_tok_s_gpu"}
_STATIC = {"model", "gpu", "precision", "tp", "isl", "osl", "batch_size", "metric", "value"}
_QUANTIZATION = {"FP8": "fp8", "FP16": None, "BF16": None}
_METRICS = {"throughput_out_tok_s_gpu": "throughput", "ttft_ms": "ttft"}


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
            except (KeyError, TypeError, ValueError) as error:
                left_out.append((name, f"its description is incomplete: {error}"))
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
