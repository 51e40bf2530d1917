"""Recorded steady states as scenarios: mean TTFT and TPOT of a server at fixed concurrency.

Load, by the benchmark's scripts: a closed loop of `concurrency` slots, all sent at once on an idle server, ten requests
per slot, lengths uniform in 0.8 to 1.0 of the nominal ones where the row says so. Servers, by their recipes: vLLM with
a budget of 8,192 tokens; SGLang with prompt chunks of 8,192 in steps of their own; TensorRT-LLM with whole prompts and
room for one prompt beside the decodes, at least 8,192 tokens. Other script settings (polling interval of arrivals, how
long ranks wait for each other's prompts) are in `recipe_arguments`.

Disaggregated serving (of DeepSeek's kind of model) has the same load, behind Dynamo's front ends; SGLang 0.5.5 was
sent half as many requests. Its recipes are those of srt-slurm (ishandhanani/srt-slurm, recipes/, branch
sa-submission-q1-2026) that SemiAnalysisAI/InferenceX names by concurrency (.github/configs/nvidia-master.yaml, March
2026); before, those of ai-dynamo/dynamo (slurm_jobs/scripts):

- SGLang's prefill workers extend in chunks of 16,384 tokens per rank (131,072 by 8 ranks, 65,536 by 4). Without
  attention data parallelism its workers on Grace look at arrivals every ten decodes.
- TensorRT-LLM's prefill workers take whole prompts: 16 of 1,024 tokens at once on a rank, 8 on H200; of 8,192 two in
  FP4 and on H200, else one.
- Ten front ends stand before SGLang's workers on Grace, and TensorRT-LLM's on GB200, each with turns of its own.
- Data-parallel attention (more than one rank) comes with whole experts per rank whatever the row says: the export reads
  `ep`, which is 1 where the all-to-all backend sets it itself; cut 32 ways, an expert of DeepSeek-V3 would be 64 wide,
  half a block of its FP8 scales.
- TensorRT-LLM's decode workers send the first token, so requests above their largest batch wait; see `_max_batch`.

Measured power under such a load, `energy.csv[.gz]`, has a row per deployment and batch limit: task, model,
weight_precision, gpu, num_gpus, tp, ep, dp, max_num_seqs, engine ("vllm 0.11.1"), server_args, avg_batch_size,
avg_output_len, output_tokens_per_s, itl_p50_ms, power_w (of all GPUs), energy_per_output_token_j. Lengths of prompts
and sizes of images are not in the data."""

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import (
    Entry,
    Observation,
    Reasons,
    described,
    lenient_rows,
    named,
    recorded_engine,
    table_rows,
)
from perfmodel.evidence.sources.setups import known_device, served_model
from perfmodel.models.number_formats import with_quantization
from perfmodel.specs import (
    Arrivals,
    ClusterSpec,
    EngineSpec,
    HardwareSpec,
    KvTransferSpec,
    Lengths,
    PoolSpec,
    Scenario,
    Traffic,
    load_hardware,
    load_model,
)
from perfmodel.specs.engine.description import describe_engine
from perfmodel.specs.traffic import ExpertRouting, Images, ImageSize

UNKNOWN_LENGTHS, SPECULATED = "lengths unknown", "speculation suspected"  # flags of a row
# Of disaggregated deployments.
_SGLANG_CHUNK = 16384
_PREFILL_TOKENS, _WIDE_PREFILL_TOKENS = 8448, 16640  # of a rank under TensorRT-LLM
_TRTLLM_OF_DYNAMO = {"0.8.1": "1.2.0rc6.post2"}  # the release that ai-dynamo 0.8.1.post1 depends on
_RECEIVE_INTERVAL = 10  # SGLang's scheduler-recv-interval, which data-parallel attention has not
_FRONT_ENDS, _SEVERAL_FRONT_ENDS = 10, ("gb200", "0.8.1.post2")
_TOKENIZERS = 64  # texts at once in Dynamo's front end, a thread each [assumed: as many as a node has cores]
_MEMORY_SHARE = 0.96  # recipes leave little: DeepSeek-V3 in FP8 on four GB200 takes 92 % for the weights alone
_MAX_PROMPTS, _MAX_SEQS = 256, 1024  # of an engine where nothing else limits it
_NIC_BYTES_PER_S = 50e9  # 400 Gbit/s per device between nodes of eight, where no rack-wide NVLink is there
_HANDSHAKE_S = 1e-3  # control messages between the two engines, Python to Python [assumed]

_REQUESTS_PER_SLOT = 10
_TOKEN_BUDGET = 8192
_QUANTIZATION = {"bf16": None, "fp8": "fp8", "fp4": "nvfp4", "int4": "w4a16"}
_PUBLISHED_SO = {"w4a16": ("mxfp4", "int4")}  # weights that a card states itself, which layers keep theirs included
_KV_AS_CHECKPOINT = ("sglang",)  # whose servers keep their default; the rows do not say it
_WEIGHT_ONLY = ("bf16", "int4")  # precisions whose activations, and so keys and values, stay in 16 bits


def is_disaggregated(entry: Entry) -> bool:
    """Whether a row has separate prefill and decode workers."""
    return bool(entry.get("prefill_num_workers")) and bool(entry.get("decode_num_workers"))


def _count(entry: Entry, key: str) -> int:
    return int(float(entry[key]))


def _disaggregated(entry: Entry, hardware: HardwareSpec, siblings: Sequence[Entry]) -> ClusterSpec:
    """The workers of a row; siblings: its sweep's rows, itself included, which share servers"""
    inputs, outputs = _count(entry, "isl"), _count(entry, "osl")
    is_trtllm, has_rack = entry["backend"] == "trtllm", hardware.declared.max_devices > 8
    version = entry.get("backend_version") or ""
    shared = {
        "kv_cache_dtype": "fp8",
        "max_model_len": inputs + outputs + 64,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": _MEMORY_SHARE,
        "profile": entry["backend"],
        "version": _TRTLLM_OF_DYNAMO.get(version[:5]) if is_trtllm else version or None,
    }
    prompts, budget = _prefill_limits(entry, inputs) if is_trtllm else (_MAX_PROMPTS, _SGLANG_CHUNK)
    batch = _max_batch(entry, siblings) if is_trtllm else _MAX_SEQS
    prefill = {"max_num_seqs": prompts, "max_num_batched_tokens": budget, "api_server_count": _TOKENIZERS}
    decode = {"max_num_seqs": batch, "max_num_batched_tokens": max(batch, 64)}
    pools = []
    for role, limits in (("prefill", prefill), ("decode", decode)):
        devices, ranks = _count(entry, f"{role}_tp_size"), _count(entry, f"{role}_attention_dp_size")
        if _is_low_latency(entry):
            devices, ranks = devices * ranks, 1
        shape = {
            "tensor_parallel_size": devices,
            "pipeline_parallel_size": _count(entry, f"{role}_pp_size"),
            "data_parallel_size": ranks,
            "enable_expert_parallel": _count(entry, f"{role}_moe_ep_size") > 1 or ranks > 1,
            "poll_every": _RECEIVE_INTERVAL if not is_trtllm and ranks == 1 and has_rack else 1,
        }
        engine = EngineSpec.model_validate(shared | limits | shape)
        pool = {"role": role, "replicas": _count(entry, f"{role}_num_workers"), "engine": engine}
        pools.append(PoolSpec.model_validate(pool))
    transfer = KvTransferSpec(latency_s=_HANDSHAKE_S)
    if not has_rack:
        transfer = KvTransferSpec(link="infiniband", bandwidth_bytes_per_s=_NIC_BYTES_PER_S, latency_s=_HANDSHAKE_S)
    has_several = has_rack and (not is_trtllm or (entry["system"], version) == _SEVERAL_FRONT_ENDS)
    return ClusterSpec(pools=tuple(pools), kv_transfer=transfer, front_ends=_FRONT_ENDS if has_several else 1)


def _is_low_latency(entry: Entry) -> bool:
    """Whether workers are tensor-parallel by their script, where the record calls all of its kind attention-parallel:
    SGLang 0.5.5 with four devices a decode worker (ai-dynamo/dynamo, slurm_jobs/scripts/gb200-fp4/disagg)"""
    return _is_old_sglang(entry) and _count(entry, "decode_attention_dp_size") == 4


def _is_old_sglang(entry: Entry) -> bool:
    return entry["backend"] == "sglang" and (entry.get("backend_version") or "").startswith("0.5.5")


def _prefill_limits(entry: Entry, inputs: int) -> tuple[int, int]:
    """(prompts, tokens) at once of a rank of TensorRT-LLM's prefill workers, by its recipes"""
    is_hopper = entry["system"].startswith("h")
    budget = _WIDE_PREFILL_TOKENS if inputs <= 1024 or is_hopper or entry["precision"] == "fp4" else _PREFILL_TOKENS
    if is_hopper and inputs <= 1024:
        budget = _PREFILL_TOKENS
    return max(budget // inputs, 1), max(budget, inputs + 64)


def _max_batch(entry: Entry, siblings: Sequence[Entry]) -> int:
    """Most sequences of one decode rank, as the recipes' names have it.

    FP8 recipes of x86 servers with 8,192 tokens in, and all of H200s, have room for all that a worker can get. Others
    name a power of two and sweep the concurrency to it or slightly above: the largest one within the sweep's largest
    concurrency per rank (for data-parallel attention, a multiple of 16). On Grace each FP8 recipe, and each of 8,192
    tokens out, has its own concurrency. The rows agree: by Little's law the decoding requests, C (1 - TTFT / E2E) per
    rank, stay at 4.0, 8.0, 16.0, 31.6 or 32.2, 121 where C is above 4, 8, 16, 32, 128."""
    is_fp8, on_grace = entry["precision"] == "fp8", entry["system"].startswith("gb")
    concurrency, is_alike = _count(entry, "concurrency"), _count(entry, "decode_attention_dp_size") > 1
    if entry["system"].startswith("h200") or (is_fp8 and not on_grace and _count(entry, "isl") > 1024):
        return concurrency if is_alike else max(concurrency // _count(entry, "decode_num_workers"), 1)
    is_alone = on_grace and (is_fp8 or _count(entry, "osl") > 1024)
    most = max(
        _count(item, "concurrency") / (_count(item, "decode_num_workers") * _count(item, "decode_attention_dp_size"))
        for item in ([entry] if is_alone else siblings)
    )
    if is_alike and most > 16:
        return int(most // 16) * 16
    return 1 << (max(int(most), 1).bit_length() - 1)


def read_steady_states(path: str | Path) -> tuple[list[Observation], Reasons]:
    """(rows, (row, reason) for undescribed ones). Unknown lengths and suspected speculation make a row unreliable."""
    path = Path(path)
    entries = table_rows(path)
    if not entries or "concurrency" not in entries[0]:
        raise SpecError(f"{path}: expected a CSV with a column `concurrency` and at least one row")

    def sweep(entry: Entry) -> tuple[str | None, ...]:
        """Key of a sweep: the deployment at the end of the row's name, and lengths."""
        return (entry.get("id") or "").rpartition("_")[2], entry.get("isl"), entry.get("osl")

    sweeps: defaultdict[tuple[str | None, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        sweeps[sweep(entry)].append(entry)
    return described(named(entries), lambda name, entry: _row(name, entry, sweeps[sweep(entry)]))


def _row(name: str, entry: Entry, siblings: Sequence[Entry]) -> Observation:
    hardware, model, precision = load_hardware(entry["system"]), load_model(entry["model_path"]), entry["precision"]
    if precision not in _QUANTIZATION:
        raise SpecError(f"precision: got {precision!r}; expected {', '.join(_QUANTIZATION)}.")
    form = _QUANTIZATION[precision]
    is_block = "fp8_block" in (entry.get("moe_quant_mode"), entry.get("gemm_quant_mode"))
    if form == "fp8" and is_block:  # published FP8 checkpoints have a scale per block or per tensor
        form = "fp8_block"
    if form is not None and model.quantization.weights not in _PUBLISHED_SO.get(form, ("mxfp4",)):
        model = with_quantization(model, form)
    concurrency, inputs, outputs = (_count(entry, key) for key in ("concurrency", "isl", "osl"))
    lengths, is_speculated = entry.get("lengths", "uniform"), entry["mtp_unlabelled"] == "True"
    prompts, answers = (
        Lengths(distribution="uniform", low=max(int((1.0 if lengths == "fixed" else 0.8) * most), 1), high=most)
        for most in (inputs, outputs)
    )
    per_slot = _REQUESTS_PER_SLOT // 2 if _is_old_sglang(entry) and is_disaggregated(entry) else _REQUESTS_PER_SLOT
    arrivals, count = Arrivals(process="closed_loop", concurrency=concurrency), per_slot * concurrency
    traffic = Traffic(arrivals=arrivals, num_requests=count, input_tokens=prompts, output_tokens=answers)
    cluster = _disaggregated(entry, hardware, siblings) if is_disaggregated(entry) else None
    engine = _engine(entry, hardware, concurrency, inputs, outputs) if cluster is None else cluster.pools[-1].engine
    shared = {} if cluster is None else {"cluster": cluster}
    scenario = Scenario(name=name, model=model, hardware=hardware, engine=engine, traffic=traffic, **shared)
    for key in ("ttft_ms", "tpot_ms"):
        if not 0 < float(entry[key]) < inf:
            raise SpecError(f"{name}: {key}: got {entry[key]}; expected a number above 0.")
    flags = [UNKNOWN_LENGTHS] * (lengths == "unknown") + [SPECULATED] * is_speculated
    return Observation(
        name,
        scenario,
        {"tpot_mean": float(entry["tpot_ms"]), "ttft_mean": float(entry["ttft_ms"])},
        groups=(
            f"engine {entry['backend']}",
            f"system {entry['system']}",
            f"model {entry['model_path'].split('/')[-1]}",
            f"precision {precision}",
            f"mtp {'suspected' if is_speculated else 'no'}",
            f"concurrency {'below 32' if float(entry['concurrency']) < 32 else '32 and above'}",
        ),
        flags="; ".join(flags),
        is_reliable=not flags,
    )


def with_dispersion(row: Observation, dispersion: float) -> Observation:
    """The row with this dispersion of expert popularity."""
    return row.under(row.scenario.model_copy(update={"routing": ExpertRouting(dispersion=dispersion)}))


def _engine(entry: Entry, hardware: HardwareSpec, concurrency: int, inputs: int, outputs: int) -> EngineSpec:
    name = entry["backend"]
    budget = _TOKEN_BUDGET
    if not describe_engine(name).facts.batching.chunks_prompts:  # room for a whole prompt beside the decodes
        budget = max(budget, -(-(concurrency + inputs + 64) // 64) * 64)
    arguments = {
        "tensor_parallel_size": int(entry["attention_tp"]),
        "data_parallel_size": int(entry["attention_dp"]),
        "enable_expert_parallel": entry["ep"] not in ("", "1"),
        "kv_cache_dtype": "auto" if name in _KV_AS_CHECKPOINT or entry["precision"] in _WEIGHT_ONLY else "fp8",
        "max_num_seqs": max(concurrency, 1),
        "max_num_batched_tokens": max(budget, concurrency),
        "max_model_len": inputs + outputs + 64,
        "enable_prefix_caching": False,
        **recipe_arguments(name, hardware.name, concurrency),
    }
    return recorded_engine(name, entry["backend_version"], hardware, arguments)


def recipe_arguments(engine: str, hardware: str, concurrency: int) -> dict[str, int]:
    """Fields of `EngineSpec` set by the scripts, where rows do not say them: SemiAnalysisAI/InferenceX (formerly
    InferenceMAX), benchmarks/*.sh, as of early 2026 [recalled]. engine, hardware: profile and device; concurrency: in
    flight"""
    if engine == "trtllm":
        return {"attention_dp_timeout_iters": 60}
    if (engine, hardware) == ("sglang", "b200-sxm"):
        return {"poll_every": 30 if concurrency >= 16 else 10}  # SCHEDULER_RECV_INTERVAL
    return {}


# ---------------------------------------------------------------- measured power

_POWER_COLUMNS = ("task", "model", "gpu", "num_gpus", "dp", "avg_batch_size", "avg_output_len", "itl_p50_ms", "power_w")
# Mean prompts of the tasks' data sets [assumed: questions of chats and of exams, code around a gap].
_PROMPTS = {"lm-arena-chat": 250, "gpqa": 320, "sourcegraph-fim": 1200}
# Text beside one image of VisionArena-Chat, or 32 frames of a video of LLaVA-Video-178K, as the benchmark sends them
# (ml-energy/benchmark, mlenergy/llm/datasets.py), and their sizes: of a few usual ones, those nearest to the rows of
# qwen3-vl-8b on H100; all other rows are left out of that choice.
_IMAGES = {
    "image-chat": (90, ImageSize(width=1200, height=900)),
    "video-chat": (60, ImageSize(width=480, height=270, num_frames=32)),
}
_LONGEST_IMAGE = 16384


def read_energy_rows(path: str | Path) -> tuple[list[Observation], Reasons]:
    """(rows, (row, reason) of those left out). Metrics are of all devices: `power` in W, `tokens_per_s` and
    `energy_per_token` (J) of output tokens; `itl` in ms. Raises SpecError for another file."""
    return described(named(lenient_rows(path, _POWER_COLUMNS, "measured power")), _power_row)


def _power_row(name: str, entry: Entry) -> Observation:
    task, batch, answer = entry["task"], float(entry["avg_batch_size"]), max(1, round(float(entry["avg_output_len"])))
    text, image = _IMAGES.get(task, (_PROMPTS.get(task), None))
    if text is None:
        raise SpecError(f"{task}: its prompts are not known.")
    hardware = known_device(entry["gpu"].lower())
    if hardware is None:
        raise SpecError(f"{entry['gpu']}: no such device.")
    devices, dp = int(entry["num_gpus"]), max(1, int(entry["dp"]))
    arguments = {
        "tensor_parallel_size": max(1, devices // dp),  # of attention; `tp` is the experts', which `ep` shares out
        "data_parallel_size": dp,
        "enable_expert_parallel": "--enable-expert-parallel" in entry["server_args"],
        "max_num_seqs": max(1, int(entry["max_num_seqs"])),
        "max_num_batched_tokens": _TOKEN_BUDGET,
        "max_model_len": text + 4 * answer + 64 + (_LONGEST_IMAGE if image else 0),
    }
    precision = entry["weight_precision"].replace("bfloat16", "bf16")
    model = served_model(entry["model"], precision).spec
    if image is not None and model.vision is None:
        raise SpecError(f"{entry['model']}: its encoder of images is not known.")
    profile, _, version = entry["engine"].partition(" ")
    scenario = Scenario(
        name=name,
        model=model,
        hardware=hardware,
        engine=recorded_engine(profile, version, hardware, arguments),
        traffic=Traffic(
            arrivals=Arrivals(process="closed_loop", concurrency=max(1, round(batch))),
            num_requests=max(1, round(batch)),
            input_tokens=Lengths(distribution="fixed", value=text),
            output_tokens=Lengths(distribution="fixed", value=answer),
            images=Images(sizes=(image,)) if image else None,
        ),
    )
    figures = {
        "itl": entry["itl_p50_ms"],
        "tokens_per_s": entry["output_tokens_per_s"],
        "power": entry["power_w"],
        "energy_per_token": entry["energy_per_output_token_j"],
    }
    metrics = {key: float(value) for key, value in figures.items()}
    return Observation(name, scenario, metrics, labels={"task": task, "devices": entry["num_gpus"]})
