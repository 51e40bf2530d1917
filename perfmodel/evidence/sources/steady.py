"""Recorded steady states as scenarios: mean TTFT and TPOT of a server at a fixed concurrency.

What the load was, as the benchmark's scripts have it: a closed loop of `concurrency` slots, all sent at once on an
idle server, ten requests per slot, lengths drawn uniformly from 0.8 to 1.0 of the nominal ones where the row says so.
How the servers ran, as their recipes have it: vLLM with a budget of 8,192 tokens; SGLang with prompts in chunks of
8,192 in steps of their own; TensorRT-LLM with whole prompts and room for one prompt beside the decodes, at least 8,192
tokens. What else the scripts set (how often arrivals are polled, how long ranks wait for each other's prompts) is in
`recipes.yaml`.

Disaggregated serving (prefill and decode workers of DeepSeek's kind of model) has the same load. What the rows do not
say, and what is assumed from the recipes instead:

- SGLang's prefill workers extend in chunks of 8,192 tokens per rank; TensorRT-LLM's take whole prompts, 8,448 tokens
  at once (or one prompt).
- Attention data parallelism (more than one rank) comes with whole experts per rank whatever the row says: the export
  reads `ep`, which is 1 where the all-to-all backend sets it by itself; cut 32 ways an expert of DeepSeek-V3 would be
  64 wide, half a block of its FP8 scales.
- TensorRT-LLM's decode workers have a maximal batch that the row does not state, and the first token is sent by the
  decode worker, so requests above it wait; see `_max_batch`.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Entry, Observation, Reasons, described, named, recorded_engine, table_rows
from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveInt
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.models.number_formats import with_quantization
from perfmodel.specs import (
    Arrivals,
    ClusterSpec,
    EngineSpec,
    HardwareSpec,
    KvTransferSpec,
    Lengths,
    ModelSpec,
    PoolSpec,
    Scenario,
    Traffic,
    load_hardware,
    load_model,
)
from perfmodel.specs.engine.description import describe_engine
from perfmodel.specs.traffic import ExpertRouting

UNKNOWN_LENGTHS, SPECULATED = "lengths unknown", "speculation suspected"  # flags of a row
# Of disaggregated deployments.
_SGLANG_CHUNK = 8192
_TRTLLM_PREFILL_TOKENS = 8448
_MEMORY_SHARE = 0.96  # recipes leave little: DeepSeek-V3 in FP8 on four GB200 takes 92 % for the weights alone
_MAX_PROMPTS, _MAX_SEQS = 256, 1024  # of an engine where nothing else limits it
_NIC_BYTES_PER_S = 50e9  # 400 Gbit/s per device between nodes of eight, where no rack-wide NVLink is there
_HANDSHAKE_S = 1e-3  # control messages between the two engines, Python to Python [assumed]

_REQUESTS_PER_SLOT = 10
_TOKEN_BUDGET = 8192
_QUANTIZATION = {"bf16": None, "fp8": "fp8", "fp4": "nvfp4", "int4": "w4a16"}
_PUBLISHED_SO = {"w4a16": ("mxfp4", "int4")}  # weights that a card states itself, which layers keep theirs included
_WEIGHT_ONLY = ("bf16", "int4")  # precisions whose activations, and so keys and values, stay in 16 bits


def is_disaggregated(entry: Entry) -> bool:
    """Whether a row describes separate prefill and decode workers."""
    return bool(entry.get("prefill_num_workers")) and bool(entry.get("decode_num_workers"))


def _disaggregated_scenario(
    name: str, entry: Entry, model: ModelSpec, hardware: HardwareSpec, traffic: Traffic, siblings: Sequence[Entry]
) -> Scenario:
    """The row `entry` as the scenario `name` of `model` on `hardware` under `traffic`.

    siblings: the rows of its sweep, itself included: they share their servers
    """
    inputs, outputs = (int(float(entry[key])) for key in ("isl", "osl"))
    is_trtllm = entry["backend"] == "trtllm"
    shared = {
        "kv_cache_dtype": "fp8",
        "max_model_len": inputs + outputs + 64,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": _MEMORY_SHARE,
        "profile": entry["backend"],
    }
    budget = max(_TRTLLM_PREFILL_TOKENS, inputs + 64) if is_trtllm else _SGLANG_CHUNK
    prefill = {"max_num_seqs": _MAX_PROMPTS, "max_num_batched_tokens": budget}
    batch = _max_batch(entry, siblings) if is_trtllm else _MAX_SEQS
    decode = {"max_num_seqs": batch, "max_num_batched_tokens": max(batch, 64)}
    pools = tuple(
        PoolSpec.model_validate(
            {
                "role": role,
                "replicas": int(float(entry[f"{role}_num_workers"])),
                "engine": EngineSpec.model_validate(shared | limits | _shape(entry, role)),
            }
        )
        for role, limits in (("prefill", prefill), ("decode", decode))
    )
    return Scenario(
        name=name,
        model=model,
        hardware=hardware,
        engine=pools[-1].engine,
        traffic=traffic,
        cluster=ClusterSpec(pools=pools, kv_transfer=_transfer(hardware)),
    )


def _shape(entry: Entry, role: str) -> dict[str, int | bool]:
    tp, pp, dp, ep = (
        int(float(entry[f"{role}_{key}"])) for key in ("tp_size", "pp_size", "attention_dp_size", "moe_ep_size")
    )
    return {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        "enable_expert_parallel": ep > 1 or dp > 1,
    }


def _transfer(hardware: HardwareSpec) -> KvTransferSpec:
    if hardware.declared.max_devices > 8:
        return KvTransferSpec(latency_s=_HANDSHAKE_S)
    return KvTransferSpec(link="infiniband", bandwidth_bytes_per_s=_NIC_BYTES_PER_S, latency_s=_HANDSHAKE_S)


def _max_batch(entry: Entry, siblings: Sequence[Entry]) -> int:
    """Sequences that one decode rank takes at once.

    Recipes name a power of two and sweep the concurrency up to it or a little above, so it is the largest one within
    the sweep's largest concurrency per rank (for attention data parallelism, a multiple of 16); each FP8 recipe on
    Grace has a concurrency of its own. The rule comes from the rows: by Little's law the requests that decode at once,
    C (1 - TTFT / E2E) per rank, stay at 4.0, 8.0, 16.0, 31.6 or 32.2, 121 where C is above 4, 8, 16, 32, 128.
    """
    is_alone = entry["precision"] == "fp8" and entry["system"].startswith("gb")
    most = max(_per_rank(item) for item in ([entry] if is_alone else siblings))
    if int(float(entry["decode_attention_dp_size"])) > 1 and most > 16:
        return int(most // 16) * 16
    return 1 << (max(int(most), 1).bit_length() - 1)


def _per_rank(entry: Entry) -> float:
    ranks = float(entry["decode_num_workers"]) * float(entry["decode_attention_dp_size"])
    return float(entry["concurrency"]) / ranks


def read_steady_states(path: str | Path) -> tuple[list[Observation], Reasons]:
    """(rows that can be described as scenarios, (row, reason) for those that cannot).

    Rows of unknown lengths, or with speculation that decodes faster than they say, are flagged and not reliable.
    """
    path = Path(path)
    entries = table_rows(path)
    if not entries or "concurrency" not in entries[0]:
        raise SpecError(f"{path}: expected a CSV with a column `concurrency` and at least one row")
    sweeps: defaultdict[tuple[str | None, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        sweeps[_sweep(entry)].append(entry)
    return described(named(entries), lambda name, entry: _row(name, entry, sweeps[_sweep(entry)]))


def _sweep(entry: Entry) -> tuple[str | None, ...]:
    """What rows of one sweep over the concurrency have in common: the deployment that ends their names, the lengths."""
    return (entry.get("id") or "").rpartition("_")[2], entry.get("isl"), entry.get("osl")


def _row(name: str, entry: Entry, siblings: Sequence[Entry]) -> Observation:
    hardware = load_hardware(entry["system"])
    model = load_model(entry["model_path"])
    form = _quantization(entry)
    if form is not None and model.quantization.weights not in _PUBLISHED_SO.get(form, ("mxfp4",)):
        model = with_quantization(model, form)
    concurrency, inputs, outputs = (int(float(entry[key])) for key in ("concurrency", "isl", "osl"))
    lengths = entry.get("lengths", "uniform")
    traffic = _traffic(lengths, concurrency, inputs, outputs)
    if is_disaggregated(entry):
        scenario = _disaggregated_scenario(name, entry, model, hardware, traffic, siblings)
    else:
        engine = _engine(entry, hardware, concurrency, inputs, outputs)
        scenario = Scenario(name=name, model=model, hardware=hardware, engine=engine, traffic=traffic)
    flags = [UNKNOWN_LENGTHS] * (lengths == "unknown") + [SPECULATED] * (entry["mtp_unlabelled"] == "True")
    for key in ("ttft_ms", "tpot_ms"):
        if not 0 < float(entry[key]) < inf:
            raise SpecError(f"{name}: {key}: got {entry[key]}; expected a number above 0.")
    metrics = {"tpot_mean": float(entry["tpot_ms"]), "ttft_mean": float(entry["ttft_ms"])}
    return Observation(name, scenario, metrics, groups=_groups(entry), flags="; ".join(flags), is_reliable=not flags)


def with_dispersion(row: Observation, dispersion: float) -> Observation:
    """The row under experts whose popularity has so much dispersion."""
    return row.under(row.scenario.model_copy(update={"routing": ExpertRouting(dispersion=dispersion)}))


def _quantization(entry: Entry) -> str | None:
    """The method of the checkpoint that was served: published FP8 ones have a scale per block or per tensor."""
    is_block = "fp8_block" in (entry.get("moe_quant_mode"), entry.get("gemm_quant_mode"))
    precision = entry["precision"]
    if precision not in _QUANTIZATION:
        raise SpecError(f"precision: found {precision!r}, allowed {', '.join(_QUANTIZATION)}.")
    return "fp8_block" if precision == "fp8" and is_block else _QUANTIZATION[precision]


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
    budget = _TOKEN_BUDGET
    if not describe_engine(name).facts.batching.chunks_prompts:  # room for a whole prompt beside the decodes
        budget = max(budget, -(-(concurrency + inputs + 64) // 64) * 64)
    arguments = {
        "tensor_parallel_size": int(entry["attention_tp"]),
        "data_parallel_size": int(entry["attention_dp"]),
        "enable_expert_parallel": entry["ep"] not in ("", "1"),
        "kv_cache_dtype": "auto" if entry["precision"] in _WEIGHT_ONLY else "fp8",
        "max_num_seqs": max(concurrency, 1),
        "max_num_batched_tokens": max(budget, concurrency),
        "max_model_len": inputs + outputs + 64,
        "enable_prefix_caching": False,
        **recipe_arguments(name, hardware.name, concurrency),
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


class _Setting(Spec):
    """One argument of an engine.

    hardware:          devices whose scripts have it; none: all
    least_concurrency: requests in flight from which on it holds
    """

    engine: str
    argument: str
    value: PositiveInt
    hardware: tuple[str, ...] = ()
    least_concurrency: PositiveInt = 1


class _Recipes(Spec):
    """Later settings replace earlier ones. unconfirmed: read from scripts from memory."""

    settings: tuple[_Setting, ...]
    unconfirmed: bool = False


@lru_cache(maxsize=1)
def _recipes() -> _Recipes:
    loaded = load_yaml(Path(__file__).with_name("recipes.yaml"))
    return parse(_Recipes, loaded.data, loaded.positions)


def recipe_arguments(engine: str, hardware: str, concurrency: int) -> dict[str, int]:
    """Arguments of `EngineSpec` that the scripts give.

    engine, hardware: names of the profile and of the device; concurrency: requests in flight
    """
    members = (item for item in _recipes().settings if item.engine == engine and concurrency >= item.least_concurrency)
    return {item.argument: item.value for item in members if not item.hardware or hardware in item.hardware}
