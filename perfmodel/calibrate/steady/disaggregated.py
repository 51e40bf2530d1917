"""Recorded steady states of disaggregated serving as scenarios: prefill and decode workers of DeepSeek's kind of model.

The load is that of `steady_state`. What the rows do not say, and what is assumed from the recipes instead:

- SGLang's prefill workers extend in chunks of 8,192 tokens per rank; TensorRT-LLM's take whole prompts, 8,448 tokens
  at once (or one prompt).
- Attention data parallelism (more than one rank) comes with whole experts per rank whatever the row says: the export
  reads `ep`, which is 1 where the all-to-all backend sets it by itself; cut 32 ways an expert of DeepSeek-V3 would be
  64 wide, half a block of its FP8 scales.
- TensorRT-LLM's decode workers have a maximal batch that the row does not state, and the first token is sent by the
  decode worker, so requests above it wait; see `_max_batch`.
"""

__all__ = ["disaggregated_scenario", "is_disaggregated"]

from collections.abc import Mapping, Sequence

from perfmodel.specs import (
    ClusterSpec,
    EngineSpec,
    HardwareSpec,
    KvTransferSpec,
    ModelSpec,
    PoolSpec,
    Scenario,
    Traffic,
)

Entry = Mapping[str, str]

_SGLANG_CHUNK = 8192
_TRTLLM_PREFILL_TOKENS = 8448
_MEMORY_SHARE = 0.96  # recipes leave little: DeepSeek-V3 in FP8 on four GB200 takes 92 % for the weights alone
_MAX_PROMPTS, _MAX_SEQS = 256, 1024  # of an engine where nothing else limits it
_NIC_BYTES_PER_S = 50e9  # 400 Gbit/s per device between nodes of eight, where no rack-wide NVLink is there
_HANDSHAKE_S = 1e-3  # control messages between the two engines, Python to Python [assumed]


def is_disaggregated(entry: Entry) -> bool:
    """Whether a row describes separate prefill and decode workers."""
    return bool(entry.get("prefill_num_workers")) and bool(entry.get("decode_num_workers"))


def disaggregated_scenario(
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
    most = max(_per_rank(each) for each in ([entry] if is_alone else siblings))
    if int(float(entry["decode_attention_dp_size"])) > 1 and most > 16:
        return int(most // 16) * 16
    return 1 << (max(int(most), 1).bit_length() - 1)


def _per_rank(entry: Entry) -> float:
    ranks = float(entry["decode_num_workers"]) * float(entry["decode_attention_dp_size"])
    return float(entry["concurrency"]) / ranks
