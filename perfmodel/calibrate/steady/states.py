"""Recorded steady states as scenarios: mean TTFT and TPOT of a server at a fixed concurrency.

What the load was, as the benchmark's scripts have it: a closed loop of `concurrency` slots, all sent at once on an
idle server, ten requests per slot, lengths drawn uniformly from 0.8 to 1.0 of the nominal ones where the row says so.
How the servers ran, as their recipes have it: vLLM with a budget of 8,192 tokens; SGLang with prompts in chunks of
8,192 in steps of their own, arrivals polled every 10 steps (30 from concurrency 16 on) on B200; TensorRT-LLM with
whole prompts and room for one prompt beside the decodes, at least 8,192 tokens; with attention data parallelism its
ranks wait up to 60 steps to compute prompts together.
"""

__all__ = ["SteadyState", "read_steady_states"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfmodel.calibrate.origins import recorded_engine
from perfmodel.calibrate.steady.disaggregated import disaggregated_scenario, is_disaggregated
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.bounded import read_rows
from perfmodel.models.formats.quantization import with_quantization
from perfmodel.specs import (
    Arrivals,
    EngineSpec,
    HardwareSpec,
    Lengths,
    Scenario,
    Traffic,
    load_hardware,
    load_model,
)
from perfmodel.specs.engine.description import describe_engine

Entry = Mapping[str, str]

_REQUESTS_PER_SLOT = 10
_TOKEN_BUDGET = 8192
# Settings of the recipes beyond sizes, by engine: iterations that ranks wait for each other's prompts, and the devices
# on which arrivals are polled seldom.
_ADP_TIMEOUT_ITERS = {"trtllm": 60}
_POLLS_SELDOM = {"sglang": ("b200-sxm",)}
_QUANTIZATION = {"bf16": None, "fp8": "fp8", "fp4": "nvfp4"}


@dataclass(frozen=True)
class SteadyState:
    """One row: its scenario, its measured means, and whether its figures can be taken at face value.

    is_clear: lengths are known and no speculation is suspected (rows with unlabelled MTP decode faster than they say)
    """

    row_id: str
    scenario: Scenario
    measured_ttft_ms: float
    measured_tpot_ms: float
    is_clear: bool
    groups: tuple[str, ...]


def read_steady_states(path: str | Path) -> tuple[list[SteadyState], list[tuple[str, str]]]:
    """(rows that can be described as scenarios, (row, reason) for those that cannot)."""
    path = Path(path)
    try:
        entries = read_rows(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not entries or "concurrency" not in entries[0]:
        raise SpecError(f"{path}: expected a CSV with a column `concurrency` and at least one row")
    rows, left_out = [], []
    sweeps = _sweeps(entries)
    for number, entry in enumerate(entries, 2):
        name = entry.get("id") or f"line {number}"
        try:
            rows.append(_row(name, entry, sweeps[_sweep(entry)]))
        except PerfmodelError as error:
            left_out.append((name, str(error)))
        except (KeyError, TypeError, ValueError) as error:
            left_out.append((name, f"its description is incomplete: {error}"))
    return rows, left_out


def _sweep(entry: Entry) -> tuple[str, str | None, str | None]:
    """What rows of one sweep over the concurrency have in common: the deployment that ends their names, the lengths."""
    return (entry.get("id") or "").rpartition("_")[2], entry.get("isl"), entry.get("osl")


def _sweeps(entries: Sequence[Entry]) -> dict[tuple[str, str | None, str | None], list[Entry]]:
    found: dict[tuple[str, str | None, str | None], list[Entry]] = {}
    for entry in entries:
        found.setdefault(_sweep(entry), []).append(entry)
    return found


def _row(name: str, entry: Entry, siblings: Sequence[Entry]) -> SteadyState:
    hardware = load_hardware(entry["system"])
    model = load_model(entry["model_path"])
    if entry["precision"] != "bf16" and model.quantization.weights != "mxfp4":
        model = with_quantization(model, _QUANTIZATION[entry["precision"]])
    concurrency, inputs, outputs = (int(float(entry[key])) for key in ("concurrency", "isl", "osl"))
    lengths = entry.get("lengths", "uniform")
    traffic = _traffic(lengths, concurrency, inputs, outputs)
    if is_disaggregated(entry):
        scenario = disaggregated_scenario(name, entry, model, hardware, traffic, siblings)
    else:
        engine = _engine(entry, hardware, concurrency, inputs, outputs)
        scenario = Scenario(name=name, model=model, hardware=hardware, engine=engine, traffic=traffic)
    is_clear = lengths != "unknown" and entry["mtp_unlabelled"] != "True"
    return SteadyState(name, scenario, float(entry["ttft_ms"]), float(entry["tpot_ms"]), is_clear, _groups(entry))


def _groups(entry: Entry) -> tuple[str, ...]:
    return (
        f"engine {entry['backend']}",
        f"system {entry['system']}",
        f"model {entry['model_path'].split('/')[-1]}",
        f"precision {entry['precision']}",
        f"mtp {'suspected' if entry['mtp_unlabelled'] == 'True' else 'no'}",
        f"concurrency {'below 32' if float(entry['concurrency']) < 32 else '32 and above'}",
    )


def _engine(entry: Entry, hardware: HardwareSpec, concurrency: int, inputs: int, outputs: int) -> EngineSpec:
    name = entry["backend"]
    budget, poll_every = _TOKEN_BUDGET, 1
    if not describe_engine(name).facts.batching.chunks_prompts:  # room for a whole prompt beside the decodes
        budget = max(budget, -(-(concurrency + inputs + 64) // 64) * 64)
    if hardware.name in _POLLS_SELDOM.get(name, ()):
        poll_every = 10 if concurrency < 16 else 30
    arguments = {
        "tensor_parallel_size": int(entry["attention_tp"]),
        "data_parallel_size": int(entry["attention_dp"]),
        "enable_expert_parallel": entry["ep"] not in ("", "1"),
        "kv_cache_dtype": "auto" if entry["precision"] == "bf16" else "fp8",
        "max_num_seqs": max(concurrency, 1),
        "max_num_batched_tokens": max(budget, concurrency),
        "max_model_len": inputs + outputs + 64,
        "enable_prefix_caching": False,
        "poll_every": poll_every,
        "attention_dp_timeout_iters": _ADP_TIMEOUT_ITERS.get(name, 0),
    }
    return recorded_engine(name, entry["backend_version"], hardware, arguments)


def _traffic(lengths: str, concurrency: int, inputs: int, outputs: int) -> Traffic:
    low = 1.0 if lengths == "fixed" else 0.8

    def drawn(nominal: int) -> Lengths:
        return Lengths(distribution="uniform", low=max(int(low * nominal), 1), high=nominal)

    return Traffic(
        arrivals=Arrivals(process="closed_loop", concurrency=concurrency),
        num_requests=_REQUESTS_PER_SLOT * concurrency,
        input_tokens=drawn(inputs),
        output_tokens=drawn(outputs),
    )
