"""How engines schedule where they differ from vLLM: facts of their code, chosen by `engine.profile`.

A scenario that sets one of these itself is left alone.

How long a freed slot waits is no rule of its own but what the serve loop gives (the lag of recorded closed loops, 1 to
2 steps). Under asynchronous scheduling the plan of step N+1 is made when N starts. A request that ends with step N has
its slot back when N is over; then N+1, planned, starts, and N+2 is planned, the first that can let someone in: the slot
stays empty for one whole step, N+1. Without it N+1 is planned after N, and the slot is filled at once.
"""

__all__ = ["EngineRules", "rules_of", "sequence_limits"]

from dataclasses import dataclass

from perfmodel.specs.engine.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class EngineRules:
    """prefill_exclusive, reserves_output, chunks_prompts: see `perfmodel.engine.SchedulerConfig`."""

    prefill_exclusive: bool = False
    reserves_output: bool = False
    chunks_prompts: bool = True


# vLLM v1: one token budget for prompts and decodes, prompts in chunks.
# SGLang: a batch extends prompts (in chunks of chunked_prefill_size) or decodes; extends go first.
# TensorRT-LLM: in-flight batching with whole prompts unless chunked context is on; the capacity scheduler's default
# policy, guaranteed no evict, admits a request only with blocks for all it may generate.
_RULES = {
    "vllm": EngineRules(),
    "sglang": EngineRules(prefill_exclusive=True),
    "trtllm": EngineRules(reserves_output=True, chunks_prompts=False),
}


def rules_of(engine: EngineSpec) -> EngineRules:
    """The rules of the profile's engine, with what the scenario sets itself."""
    own = _RULES.get(engine.profile, EngineRules())
    return EngineRules(
        own.prefill_exclusive if engine.prefill_exclusive is None else engine.prefill_exclusive,
        own.reserves_output if engine.reserve_output is None else bool(engine.reserve_output),
        engine.enable_chunked_prefill
        if "enable_chunked_prefill" in engine.model_fields_set
        else own.chunks_prompts and engine.enable_chunked_prefill,
    )


def sequence_limits(engine: EngineSpec) -> tuple[int, int]:
    """Sequences that run at once, and those of one plan on pipeline stages (0: no limit of its own).

    vLLM: `max_num_seqs` in all, however they come together. SGLang: as many in all, an even share in each micro-batch
    (pp_max_micro_batch_size by default). TensorRT-LLM: `max_batch_size` in each, max_batch_size * pp_size in all.
    """
    most, num_stages = engine.max_num_seqs, engine.pipeline_parallel_size
    if num_stages > 1 and engine.profile == "sglang":
        return most, max(most // num_stages, 1)
    if num_stages > 1 and engine.profile == "trtllm":
        return most * num_stages, most
    return most, 0
