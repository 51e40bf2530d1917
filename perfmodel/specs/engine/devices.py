"""An engine on a device: its version's defaults there, what an answer says of them, and the units that it asks for."""

__all__ = [
    "VERSIONED_DEFAULTS",
    "default_of",
    "engine_notes",
    "refuse_missing_units",
    "with_defaults",
]

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfmodel.specs.engine.description import EngineDefaults, EngineFacts, StepBudget, Use
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

_ON_EVERY_DEVICE = ("gpu_memory_utilization", "block_size", "async_scheduling", "ubatch_size", "attention")
_OF_A_STEP = ("max_num_batched_tokens", "max_num_seqs")
VERSIONED_DEFAULTS = (*_ON_EVERY_DEVICE, *_OF_A_STEP)


def with_defaults(
    engine: EngineSpec, hardware: HardwareSpec, use: Use = "server", max_model_len: int | None = None
) -> EngineSpec:
    """`engine` with its version's default for every argument that it was not given.

    `model_fields_set` still has those that were given, so that other devices get their own defaults.

    hardware:      the devices that it runs on
    use:           server, or offline: all requests are there at once
    max_model_len: the model's longest sequence, tokens, where `engine` gives none

    Raises ValueError where the arguments given leave no room for the defaults of the others.
    """
    longest = engine.max_model_len or max_model_len
    defaults = _defaults(engine, hardware, use, longest or 0)
    update = {name: value for name, value in defaults.items() if name not in engine.model_fields_set}
    merged = {**dict(engine), **update, "max_model_len": longest}
    if engine.batching == "continuous" and merged["max_num_batched_tokens"] < merged["max_num_seqs"]:
        raise ValueError(
            f"max_num_batched_tokens={merged['max_num_batched_tokens']}, the default of {engine.described.label} on "
            f"{hardware.name}, is below max_num_seqs={merged['max_num_seqs']}; give the first, or lower the second"
        )
    return EngineSpec.model_construct(_fields_set=set(engine.model_fields_set), **merged)


def default_of(name: str, given: Mapping[str, Any], hardware: HardwareSpec, use: Use = "server") -> Any:
    """The default of the argument `name` beside the arguments `given` of an engine, or None where no version has one.

    name:     of a field of `EngineSpec`
    given:    what a file says under `engine`, as it was read
    hardware: the devices that it runs on
    use:      server, or offline
    """
    kept = {key: given[key] for key in ("profile", "version", *_OF_A_STEP) if key in given and key != name}
    return _defaults(EngineSpec.model_validate(kept), hardware, use, 0).get(name)


def engine_notes(*engines: EngineSpec, roles: Sequence[str] = ()) -> tuple[str, ...]:
    """Which versions stand in for others, and the defaults that were taken.

    roles: of the engines, if there are several: defaults of some engines only are followed by the roles of these
    """
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
    """`block_size 16` for each default, except those that nearly all engines share."""
    plain = EngineDefaults()
    for name in VERSIONED_DEFAULTS:
        value = getattr(engine, name)
        is_usual = name in ("ubatch_size", "attention") and value == getattr(plain, name)
        is_unused = name == "gpu_memory_utilization" and engine.num_gpu_blocks_override is not None
        if name not in engine.model_fields_set and not is_usual and not is_unused:
            yield f"{name} {_shown(value)}"


def _defaults(engine: EngineSpec, hardware: HardwareSpec, use: Use, longest: int) -> dict[str, Any]:
    facts = engine.described.facts
    found: dict[str, Any] = {name: getattr(facts.defaults, name) for name in _ON_EVERY_DEVICE}
    found["enable_chunked_prefill"] = facts.batching.chunks_prompts
    exchange = next((each for each in facts.all2all if each.fits(hardware)), None)
    if exchange is not None and exchange.backend is not None:
        found["all2all_backend"] = exchange.backend
    budget = next((each for each in facts.budgets if each.fits(hardware, use)), None)
    return found | (_step_size(budget, engine, facts, longest) if budget is not None else {})


def _step_size(budget: StepBudget, engine: EngineSpec, facts: EngineFacts, longest: int) -> dict[str, int]:
    """Sequences never exceed tokens, as in vLLM (`EngineArgs._set_default_max_num_seqs_and_batched_tokens_args`)."""
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
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def refuse_missing_units(engine: EngineSpec, hardware: HardwareSpec) -> None:
    """Raises ValueError with one sentence for TF32 that nothing multiplies in, FP16 sums of other products, and
    FlashAttention-3 off Hopper.
    """
    if engine.flash_attn_version == 3 and hardware.declared.architecture != "hopper":
        raise ValueError(
            f"found engine.flash_attn_version=3 on {hardware.name}, and its asynchronous products (WGMMA) and copies "
            f"(TMA) are Hopper's; leave it out, or set 2"
        )
    if engine.allow_fp16_accumulation and engine.dtype != "float16":
        raise ValueError(
            f"found engine.allow_fp16_accumulation with engine.dtype={engine.dtype}, and only FP16 products are "
            f"summed in FP16; set engine.dtype to float16, or leave it out"
        )
    if engine.float32_matmul_precision != "high":
        return
    if engine.dtype != "float32":  # "auto" serves a checkpoint in FP32 in 16 bits
        raise ValueError(
            f"found engine.float32_matmul_precision=high with engine.dtype={engine.dtype}, and only FP32 is multiplied "
            f"as TF32; set engine.dtype to float32, or leave it out"
        )
    if "tf32" not in hardware.declared.peak_flops_per_s:
        raise ValueError(
            f"found engine.float32_matmul_precision=high on {hardware.name}, which has no TF32 units (no "
            f"peak_flops_per_s.tf32 in its hardware file); leave it at highest, or set engine.dtype to bfloat16"
        )
