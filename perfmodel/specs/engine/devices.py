"""An engine on a device: version defaults, notes on them, and refusals to start (formats, parallelism, KV block sizes,
lengths). `load_scenario` and so every command asks here, so all refuse alike."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.models.architecture import KEYED, Attention, CompressedAttention, LatentAttention, MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.architectures import find_architecture
from perfmodel.specs.engine.description import EngineDefaults, EngineFacts, StepBudget, Use, backend_of
from perfmodel.specs.engine.formats import refuse_formats
from perfmodel.specs.engine.pooling import pooling_refusals
from perfmodel.specs.engine.spec import EngineSpec, LoraModule
from perfmodel.specs.hardware import HardwareSpec

_ON_EVERY_DEVICE = ("gpu_memory_utilization", "block_size", "async_scheduling", "ubatch_size", "attention")
_OF_A_STEP = ("max_num_batched_tokens", "max_num_seqs")
VERSIONED_DEFAULTS = (*_ON_EVERY_DEVICE, *_OF_A_STEP)


def with_defaults(
    engine: EngineSpec,
    hardware: HardwareSpec,
    use: Use = "server",
    max_model_len: int | None = None,
    of_model: Mapping[str, Any] | None = None,
) -> EngineSpec:
    """`engine` with defaults for `hardware` and `use` filled in; `model_fields_set` keeps the given ones.

    max_model_len: the model's limit in tokens, if `engine` has none; of_model: defaults that its kind brings. Raises
    ValueError where the given arguments leave no valid defaults."""
    longest = engine.max_model_len or max_model_len
    own = {name: value for name, value in (of_model or {}).items() if name not in engine.model_fields_set}
    if own:
        engine = EngineSpec.model_construct(_fields_set=set(engine.model_fields_set), **{**dict(engine), **own})
    defaults = _defaults(engine, hardware, use, longest or 0) | own
    update = {name: value for name, value in defaults.items() if name not in engine.model_fields_set}
    merged = {**dict(engine), **update, "max_model_len": longest}
    if engine.batching == "continuous" and merged["max_num_batched_tokens"] < merged["max_num_seqs"]:
        raise ValueError(
            f"max_num_batched_tokens={merged['max_num_batched_tokens']}, the default of {engine.described.label} on "
            f"{hardware.name}, is below max_num_seqs={merged['max_num_seqs']}; give the first, or lower the second"
        )
    return EngineSpec.model_construct(_fields_set=set(engine.model_fields_set), **merged)


def default_of(name: str, given: Mapping[str, Any], hardware: HardwareSpec, use: Use = "server") -> Any:
    """Default of field `name` beside the arguments `given` on `hardware` in `use`; None if there is none."""
    kept = {key: given[key] for key in ("profile", "version", *_OF_A_STEP) if key in given and key != name}
    return _defaults(EngineSpec.model_validate(kept), hardware, use, 0).get(name)


def engine_notes(*engines: EngineSpec, roles: Sequence[str] = ()) -> tuple[str, ...]:
    """Versions that stand in for others, and defaults taken; `roles` label those of some engines only."""
    notes = []
    roles_of: dict[str, dict[str, list[str]]] = {}  # the engine's label -> default -> roles of the engines with it
    for engine, role in zip(engines, roles or [""] * len(engines), strict=True):
        described = engine.described
        stands = described.version.note or described.version.stand_in
        notes += [f"{described.description.title}: {stands}."] if stands else []
        for default in _defaults_taken(engine):
            roles_of.setdefault(described.label, {}).setdefault(default, []).append(role)
    for label, taken in roles_of.items():
        num_engines = sum(engine.described.label == label for engine in engines)
        values = [
            default if len(of) == num_engines else f"{default} ({' and '.join(dict.fromkeys(of))})"
            for default, of in taken.items()
        ]
        notes.append(f"Defaults of {label}: {', '.join(values)}.")
    return tuple(dict.fromkeys(notes))


def _defaults_taken(engine: EngineSpec) -> Iterator[str]:
    """`block_size 16` per default, except nearly universal ones."""
    plain = EngineDefaults()
    for name in VERSIONED_DEFAULTS:
        value = getattr(engine, name)
        is_usual = name in ("ubatch_size", "attention") and value == getattr(plain, name)
        is_unused = name == "gpu_memory_utilization" and engine.num_gpu_blocks_override is not None
        if name not in engine.model_fields_set and not is_usual and not is_unused:
            yield f"{name} {_shown(value)}"


def _defaults(engine: EngineSpec, hardware: HardwareSpec, use: Use, longest: int) -> dict[str, Any]:
    facts = engine.described.facts
    defaults: dict[str, Any] = {name: getattr(facts.defaults, name) for name in _ON_EVERY_DEVICE}
    defaults["enable_chunked_prefill"] = facts.batching.chunks_prompts
    exchange = next((item for item in facts.all2all if item.fits(hardware)), None)
    if exchange is not None and exchange.backend is not None:
        defaults["all2all_backend"] = exchange.backend
    budget = next((item for item in facts.budgets if item.fits(hardware, use)), None)
    return defaults | (_step_size(budget, engine, facts, longest) if budget is not None else {})


def _step_size(budget: StepBudget, engine: EngineSpec, facts: EngineFacts, longest: int) -> dict[str, int]:
    """At most as many sequences as tokens (vLLM, `EngineArgs._set_default_max_num_seqs_and_batched_tokens_args`)."""
    times, given = engine.num_devices if budget.per_device else 1, engine.model_fields_set
    tokens, sequences = budget.max_num_batched_tokens * times, budget.max_num_seqs * times
    if facts.batching.whole_prompts_raise_budget and not engine.enable_chunked_prefill:
        tokens = max(tokens, longest)
    if "max_num_batched_tokens" in given:
        tokens = engine.max_num_batched_tokens
    return {"max_num_batched_tokens": tokens, "max_num_seqs": min(sequences, tokens)}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def refuse_missing_units(engine: EngineSpec, hardware: HardwareSpec) -> None:
    """Raise ValueError for several slices of a GPU as ranks of one engine, unavailable TF32, FP16 accumulation of
    non-FP16 products, or FlashAttention-3 off Hopper."""
    drafts = engine.speculative_config
    num_devices = engine.num_devices * (2 if drafts is not None and drafts.has_own_device else 1)
    if hardware.is_slice and num_devices > 1:
        raise ValueError(
            f"got {num_devices} devices for an engine on {hardware.name}, and slices of a GPU exchange nothing "
            f"with each other; use one, as engine.tensor_parallel_size=1, and more replicas"
        )
    if engine.flash_attn_version == 3 and not find_architecture(hardware.declared.architecture).has_wgmma:
        raise ValueError(
            f"got engine.flash_attn_version=3 on {hardware.name}, and its asynchronous products (WGMMA) and copies "
            f"(TMA) are Hopper's; leave it out, or set 2"
        )
    if engine.allow_fp16_accumulation and engine.dtype != "float16":
        raise ValueError(
            f"got engine.allow_fp16_accumulation with engine.dtype={engine.dtype}, and only FP16 products are "
            f"summed in FP16; set engine.dtype to float16, or leave it out"
        )
    if engine.float32_matmul_precision != "high":
        return
    if engine.dtype != "float32":  # "auto" serves a checkpoint in FP32 in 16 bits
        raise ValueError(
            f"got engine.float32_matmul_precision=high with engine.dtype={engine.dtype}, and only FP32 is multiplied "
            f"as TF32; set engine.dtype to float32, or leave it out"
        )
    if "tf32" not in hardware.declared.peak_flops_per_s:
        raise ValueError(
            f"got engine.float32_matmul_precision=high on {hardware.name}, which has no TF32 units (no "
            f"peak_flops_per_s.tf32 in its hardware file); leave it at highest, or set engine.dtype to bfloat16"
        )


_MIN_LENGTH = 2
# Kinds of RoPE whose max_position_embeddings is what they reach; that of others is what they are stretched from.
_SCALED_WITHIN = (None, "default", "llama3", "longrope", "su", "mrope")


def refuse_to_start(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
    """Raise UnsupportedError in one sentence for what `engine` does not start with. model: in its served formats."""
    refuse_formats(model, engine, hardware)
    adapters = _adapter_refusals(model, engine) if engine.enable_lora else ()
    for field, reason, sentence in (*_backend_refusals(engine, hardware), *_size_refusals(model, engine), *adapters):
        raise UnsupportedError(sentence, reason, f"engine.{field}")


def heads_divide(model: ModelSpec, tensor_parallel_size: int) -> bool:
    """Whether attention heads divide evenly, as vLLM demands.

    KV heads are divided or replicated: one of their number and the size divides the other (`QKVParallelLinear`)."""
    kv_heads = {layer.mixer.num_kv_heads for layer, _ in model.layers if isinstance(layer.mixer, Attention)}
    size = tensor_parallel_size
    return all(n % size == 0 for n in _heads(model)) and all(not n % size or not size % n for n in kv_heads)


def _heads(model: ModelSpec) -> list[int]:
    mixers = [layer.mixer for layer, _ in model.layers]
    groups = {mixer.o_groups for mixer in mixers if isinstance(mixer, CompressedAttention)}
    return sorted(groups | {mixer.num_heads for mixer in mixers if isinstance(mixer, KEYED)})


def _backend_refusals(engine: EngineSpec, hardware: HardwareSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for single-machine features and backends unavailable on the device."""
    facts, name = engine.described.facts, engine.described.description.name
    if facts.backends:
        try:
            backend_of(engine.backend, facts.backends, hardware)
        except SpecError as error:
            field = "profile" if engine.backend is None else "backend"
            yield field, "no backend for the device", str(error).partition(": ")[2].rstrip(".")
    elif engine.backend is not None:
        sentence = f"got {engine.backend}, and {name} has one backend only; leave it out"
        yield "backend", "the engine has no backends", sentence
    layers = engine.n_gpu_layers
    if layers is not None and facts.offloads_from_tokens and hardware.kind == "cpu":
        sentence = (
            f"got {layers} on {hardware.name}, a CPU, which computes all layers itself; leave it and engine.cpu out, "
            f"or set hardware to the GPU"
        )
        yield "n_gpu_layers", "no GPU for n_gpu_layers", sentence
    way_out = f"which {name} does not have; leave it out, or set profile to llamacpp"
    if layers is not None and not facts.offloads_from_tokens:
        yield "n_gpu_layers", "the engine has no n_gpu_layers", f"got {layers}, {way_out}"
    if engine.layer_split > 1 and not facts.pieces_under_way:
        yield "layer_split", "the engine has no layer_split", f"got {engine.layer_split}, {way_out}"


def _size_refusals(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for parallelism, KV blocks and lengths."""
    tp, pp, facts = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.described.facts
    if not heads_divide(model, tp):
        heads = _heads(model)
        sizes = (size for size in range(1, max(heads) + 1) if heads_divide(model, size))
        sentence = (
            f"got {tp}, and the {_listed(heads)} attention heads of {model.name} cannot be shared out over so many; "
            f"expected {_listed(sizes)}"
        )
        yield "tensor_parallel_size", "attention heads do not divide by tensor_parallel_size", sentence
    yield from _stripe_refusals(model, engine)
    yield from pooling_refusals(model, engine)
    yield from _prompt_split_refusals(model, engine)
    yield from _overlap_refusals(model, engine)
    yield from _afd_refusals(model, engine)
    if pp > model.num_layers:
        sentence = f"got {pp} stages, and {model.name} has {model.num_layers} layers; expected 1 to {model.num_layers}"
        yield "pipeline_parallel_size", "more pipeline stages than layers", sentence
    if engine.enable_expert_parallel and not any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers):
        sentence = f"got true, and {model.name} has no experts to share out; leave it out"
        yield "enable_expert_parallel", "expert parallelism without experts to share out", sentence
    sizes_taken = facts.kv_block_sizes
    if sizes_taken and engine.kv_cache == "paged" and engine.block_size not in sizes_taken:
        label = engine.described.label
        sentence = f"got {engine.block_size}, and {label} takes KV blocks of {_listed(sizes_taken)} tokens"
        yield "block_size", "KV blocks of a size that the engine does not take", sentence
    length, trained = engine.max_model_len, model.max_position_embeddings
    if length is not None and length < _MIN_LENGTH:
        sentence = f"got {length}; expected at least {_MIN_LENGTH}: a token of the prompt and one of the answer"
        yield "max_model_len", "max_model_len without room for an answer", sentence
    # Positions that the model was not trained for give wrong answers; engines that say so do not start.
    is_limited = facts.limits_to_positions and model.rope_scaling in _SCALED_WITHIN
    if length is not None and length > trained and is_limited:
        sentence = (
            f"got {length}, and {model.name} has positions up to {trained}; expected up to that, or another "
            f"rope_scaling in a copy of its config.json"
        )
        yield "max_model_len", "max_model_len beyond the model's positions", sentence


def _stripe_refusals(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for KV caches that ranks of decode context parallelism cannot share out."""
    size, tp = engine.decode_context_parallel_size, engine.tensor_parallel_size
    mixers = [layer.mixer for layer, _ in model.layers if isinstance(layer.mixer, KEYED)]
    if size == 1:
        return
    field = "decode_context_parallel_size"
    if not engine.described.facts.stripes_kv:
        sentence = f"got {size}, and {engine.described.label} does not have it; leave it out, or name another engine"
        yield field, "the engine has no decode context parallelism", sentence
    heads = [mixer.num_kv_heads if isinstance(mixer, Attention) else 1 for mixer in mixers]
    copies = sorted({max(1, tp // count) for count in heads}) or [0]
    if any(not count or count % size for count in copies):
        sentence = (
            f"got {size}, and each KV head of {model.name} is on {_listed(copies)} of {tp} tensor-parallel devices; "
            f"expected a divisor of that"
        )
        yield field, "no copies of KV heads to share tokens out over", sentence
    if _sees_part(model):
        sentence = f"got {size}, which is modelled where all layers attend to all keys, and some of {model.name} do not"
        yield field, "decode context parallelism beside other layers", sentence


_MAX_LORA_VOCABULARY = 258_048  # vllm/lora/layers/logits_processor.py


def _adapter_refusals(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for engines and layers whose LoRA adapters are not described."""
    modules, layers = set(engine.lora_target_modules or get_args(LoraModule)), [layer for layer, _ in model.layers]
    is_mixed = bool(modules & {"qkv_proj", "o_proj"}) and any(not isinstance(x.mixer, Attention | None) for x in layers)
    has_experts = bool(modules & {"gate_up_proj", "down_proj"}) and any(isinstance(x.ffn, MoEFFN) for x in layers)
    is_wide = bool(modules & {"embed_tokens", "lm_head"}) and model.vocab_size > _MAX_LORA_VOCABULARY
    way_out = f"which {model.name} has; name others in lora_target_modules, as in [qkv_proj, o_proj], or leave it out"
    cases = {
        f"adapters of {engine.described.label} are not described; set profile to vllm": engine.rules.serves_adapters
        == "no",
        f"adapters of experts are not modelled, {way_out}": has_experts,
        f"adapters of other layers than softmax attention are not modelled, {way_out}": is_mixed,
        "adapters are not modelled beside prefill_context_parallel_size or enable_dbo; leave one of them out": (
            engine.prefill_context_parallel_size > 1 or engine.enable_dbo
        ),
        f"adapters are not modelled with early exit, which {model.name} has; leave it out": model.exits is not None,
        f"it serves them for vocabularies up to {_MAX_LORA_VOCABULARY:,} tokens, and {model.name} has "
        f"{model.vocab_size:,}; name linear layers in lora_target_modules": is_wide,
    }
    for sentence, applies in cases.items():
        if applies:
            yield "enable_lora", "LoRA adapters that are not modelled", f"got true, and {sentence}"


def _prompt_split_refusals(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for prompts whose tokens ranks cannot share out.

    Source: vLLM v0.30.0, vllm/v1/worker/gpu/pcp_manager.py, validate_config; vllm/platforms/cuda.py."""
    field, size = "prefill_context_parallel_size", engine.prefill_context_parallel_size
    if size == 1:
        return
    mixers = [layer.mixer for layer, _ in model.layers]
    able, label = engine.described.facts.splits_prompts, engine.described.label
    if able == "none":
        sentence = f"got {size}, and {label} does not have it; leave it out, or name another engine"
        yield field, "the engine has no prefill context parallelism", sentence
    if able == "latents" and not all(isinstance(mixer, LatentAttention) for mixer in mixers):
        sentence = f"got {size}, and {label} splits prompts of latent attention (MLA) only, which {model.name} has not"
        yield field, "prefill context parallelism without latents", f"{sentence}; leave it out, or name another engine"
    for name in ("data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if (other := getattr(engine, name)) > 1:
            sentence = f"got {size} beside engine.{name}={other}, with which it is not modelled; set one of them to 1"
            yield field, f"prefill context parallelism beside {name}", sentence
    if _sees_part(model):
        sentence = f"got {size}, which is modelled where all layers attend to all keys, and some of {model.name} do not"
        yield field, "prefill context parallelism beside other layers", sentence


def _sees_part(model: ModelSpec) -> bool:
    """Whether layers keep or see other than all keys and values."""
    mixers = [layer.mixer for layer, _ in model.layers]
    is_limited = any(
        isinstance(mixer, CompressedAttention) or getattr(mixer, "indexer", None) or getattr(mixer, "sparsity", None)
        for mixer in mixers
    )
    return bool(is_limited or model.attention_spans or model.has_states)


def _overlap_refusals(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for exchanges that two halves of a step cannot take in turns."""
    by_rows = engine.all2all_backend == "deepep_auto"
    if by_rows and engine.speculative_config is not None:
        sentence = "got deepep_auto with engine.speculative_config, whose steps verify several tokens; name one mode"
        yield "all2all_backend", "kernels by kind of step beside drafts", sentence
    if not engine.enable_dbo:
        return
    field, backend = "enable_dbo", engine.all2all_backend or ""
    if not backend.startswith("deepep") or engine.data_parallel_size == 1 or not engine.enable_expert_parallel:
        sentence = (
            "got true, and there are no DeepEP messages to hide under work; set engine.data_parallel_size, "
            "engine.enable_expert_parallel and engine.all2all_backend to deepep_low_latency, deepep_high_throughput or "
            "deepep_auto, or leave it out"
        )
        yield field, "two-batch overlap without DeepEP's exchanges", sentence
    others = {
        "speculative_config": engine.speculative_config is not None,
        "pipeline_parallel_size": engine.pipeline_parallel_size > 1,
        "decode_context_parallel_size": engine.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": engine.prefill_context_parallel_size > 1,
    }
    if model.has_states:
        sentence = f"got true, and {model.name} has recurrent states, whose steps are not split; leave it out"
        yield field, "two-batch overlap of recurrent layers", sentence
    for name in (name for name, is_given in others.items() if is_given):
        sentence = f"got true beside engine.{name}, with which halves of steps are not modelled; leave one of them out"
        yield field, "two-batch overlap beside another split of steps", sentence


def _afd_refusals(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for what feed-forward blocks on devices of their own are not modelled with."""
    if engine.afd_config is None:
        return
    sizes = ("tensor", "pipeline", "prefill_context", "decode_context")
    flags = ("enable_dbo", "enable_eplb", "enable_lora", "speculative_config", "kv_offload", "n_gpu_layers")
    others = {
        **{f"engine.{name}_parallel_size": getattr(engine, f"{name}_parallel_size") > 1 for name in sizes},
        **{f"engine.{name}": bool(getattr(engine, name)) for name in flags},
        "engine.layer_split": engine.layer_split > 1,
        "engine.fused_kernels=false": not engine.fused_kernels,
        "engine.kv_cache=off": engine.kv_cache == "off",
        f"early exit, which {model.name} has": model.exits is not None,
        f"{model.name}, which generates no text": model.pooling is not None or engine.runner == "pooling",
        f"{model.name}, which has no experts": not any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers),
    }
    for name in (name for name, is_given in others.items() if is_given):
        sentence = f"got it beside {name}, with which it is not modelled; leave one of them out"
        yield "afd_config", "separate attention and feed-forward devices beside others", sentence


def _listed(values: Iterable[int]) -> str:
    """`1, 2 or 4`"""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
