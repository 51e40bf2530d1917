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

from collections.abc import Sequence
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Entry, Observation, Reasons, described, recorded_engine, table_rows
from perfmodel.models.number_formats import with_quantization
from perfmodel.specs import Arrivals, Lengths, Scenario, Traffic, load_hardware, load_model

SATURATED = "saturated"  # flag of a row: more requests wait than run, all the time; else all of its requests run
_ENGINE = "trtllm"  # that such tables are of
_MOST_SEQUENCES = 2048
_TOKEN_BUDGET = 8192
_IN_FLIGHT = {"model", "gpu", "precision", "tp", "isl", "osl", "throughput_out_tok_s_gpu"}
_STATIC = {"model", "gpu", "precision", "tp", "isl", "osl", "batch_size", "metric", "value"}
_QUANTIZATION = {"FP8": "fp8", "FP16": None, "BF16": None}
_STATIC_METRICS = {"throughput_out_tok_s_gpu": "static_throughput", "ttft_ms": "ttft"}


def read_offline_runs(path: str | Path) -> tuple[list[Observation], Reasons]:
    """(rows that can be described as scenarios, (row, reason) for those that cannot), of a CSV or a folder of them.

    Metrics: throughput, static_throughput (output tokens/s and device), ttft (ms). Raises SpecError for what cannot be
    read, or is neither kind of table.
    """
    path = Path(path)
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise SpecError(f"{path}: has no .csv file; give one, or a folder of them.")
    entries = [(f"{file.name}:{number}", entry) for file in files for number, entry in enumerate(_entries(file), 2)]
    return described(entries, _row)


def _entries(file: Path) -> Sequence[Entry]:
    entries = table_rows(file)
    found = set(entries[0]) if entries else set()
    if not (found >= _IN_FLIGHT or found >= _STATIC):
        raise SpecError(
            f"{file}: expected a CSV of throughputs with columns {', '.join(sorted(_IN_FLIGHT))}; or, of static "
            f"batches, {', '.join(sorted(_STATIC))}."
        )
    return entries


def _row(name: str, entry: Entry) -> Observation:
    is_static = "batch_size" in entry
    model, quantization = load_model(entry["model"]), _QUANTIZATION[entry["precision"]]
    model, hardware = (
        model if quantization is None else with_quantization(model, quantization),
        load_hardware(entry["gpu"]),
    )
    inputs, outputs = int(entry["isl"]), int(entry["osl"])
    count = int(entry["batch_size"]) if is_static else _MOST_SEQUENCES
    least = count * inputs if is_static else inputs + count
    arguments = {
        "tensor_parallel_size": int(entry["tp"]),
        "dtype": "float16",
        "kv_cache_dtype": "fp8" if entry["precision"] == "FP8" else "auto",
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_num_seqs": count,
        "max_num_batched_tokens": max(_TOKEN_BUDGET, least),
        "max_model_len": inputs + outputs,
        **({"batching": "static"} if is_static else {}),
    }
    engine = recorded_engine(_ENGINE, entry.get("trtllm_version") or "", hardware, arguments)
    traffic = Traffic(
        arrivals=Arrivals(process="burst"),
        num_requests=count,
        input_tokens=Lengths(distribution="fixed", value=inputs),
        output_tokens=Lengths(distribution="fixed", value=outputs),
    )
    scenario = Scenario(name=name, model=model, hardware=hardware, engine=engine, traffic=traffic)
    metric = _STATIC_METRICS[entry["metric"]] if is_static else "throughput"
    measured = float(entry["value"] if is_static else entry["throughput_out_tok_s_gpu"])
    served = scenario.model  # in the format that the engine computes in
    lengths = f"{inputs:,} in, {outputs:,} out"
    label = f"{served.name} {served.quantization.weights or served.dtype} on {entry['tp']} x {hardware.name}, {lengths}"
    return Observation(
        name,
        scenario,
        {metric: measured},
        label=f"{label}, batch {count}" if is_static else label,
        labels={"tokens": lengths},
        flags="" if is_static else SATURATED,
    )
