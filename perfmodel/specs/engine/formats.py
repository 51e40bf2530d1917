"""Number formats by engine version and device generation: native, emulated, weight-only, refused."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from perfmodel.errors import UnsupportedError
from perfmodel.files.device_tables import known_architectures
from perfmodel.models.architecture import QuantizationSpec
from perfmodel.models.layer_formats import with_layer_formats
from perfmodel.models.number_formats import kv_format, matmul_rate
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.architectures import name_in_tables
from perfmodel.specs.engine.description import (
    ExpertsRow,
    FormatRow,
    FormatSupport,
    LatentPromptsRow,
    SparseAttentionRow,
)
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

FormatOf = Literal["weights", "kv_cache"]

_SPOKEN = {"fp8_block": "FP8 in blocks", "w8a16": "INT8 weights with 16-bit activations"}
# What `engine.dtype` and `engine.quantization` call a form of the descriptions.
_ARGUMENTS = {"bf16": "dtype=bfloat16", "fp16": "dtype=float16", "int4": "w4a16", "nf4": "bitsandbytes"}


@dataclass(frozen=True, slots=True)
class FormatUse:
    """support: None if the description does not say; kernel: its name, where known."""

    support: FormatSupport | None
    kernel: str = ""


def format_use(engine: EngineSpec, hardware: HardwareSpec, form: str, of: FormatOf = "weights") -> FormatUse:
    """Use of a number format by `engine` on `hardware`; unknown for unlisted formats and generations.

    form: as in tables of kernels: fp8 (a scale per tensor, channel or token), fp8_block (per weight block), int8, int4,
          mxfp4, nvfp4, nf4
    of:   weights, or cached keys and values"""
    rows = getattr(engine.described.facts, of).get(form)
    if rows is None or hardware.declared.architecture is None:
        return FormatUse(None)
    generation = _generation(rows, hardware)
    row = next((row for row in rows if generation in row.on), None)
    if row is not None:
        return FormatUse(row.support, row.kernel)
    return FormatUse("refused" if generation in known_architectures() else None)


def experts_use(
    engine: EngineSpec, hardware: HardwareSpec, quantization: QuantizationSpec, dtype: str
) -> ExpertsRow | None:
    """How `engine` runs routed experts in `quantization` (or `dtype`) on `hardware`; None if not described."""
    form = dtype if "experts" in quantization.kept else form_of(quantization) or dtype
    rows = engine.described.facts.experts
    generation = _generation(rows, hardware)
    num_ranks = 1 if engine.enable_expert_parallel else engine.tensor_parallel_size * engine.data_parallel_size
    return next((row for row in rows if row.fits(form, generation) and num_ranks >= row.ranks_from), None)


def sparse_heads_per_tile(engine: EngineSpec, hardware: HardwareSpec) -> int:
    """Minimum heads per tile of the prompt kernel with an indexer; 1 if not described."""
    rows = engine.described.facts.sparse_attention
    generation = _generation(rows, hardware)
    return next((row.heads_per_tile for row in rows if not row.on or generation in row.on), 1)


def latent_prompts(engine: EngineSpec, hardware: HardwareSpec) -> LatentPromptsRow | None:
    """The kernel of prompts over latents that tables time apart; None where they run that of heads of their size."""
    rows = engine.described.facts.latent_prompts
    generation = _generation(rows, hardware)
    return next((row for row in rows if not row.on or generation in row.on), None)


def _generation(
    rows: Iterable[FormatRow | ExpertsRow | SparseAttentionRow | LatentPromptsRow], hardware: HardwareSpec
) -> str | None:
    return name_in_tables(hardware.declared.architecture, {name for row in rows for name in row.on})


def form_of(quantization: QuantizationSpec) -> str | None:
    """Listed format of quantized weights, or None.

    Integers are named by their products: int8 with INT8 activations, int4 with 16-bit activations; others (w8a16, w4a8,
    llm_int8) have their own names."""
    weights, activations = quantization.weights, quantization.activations
    if weights is None:
        return None
    if weights == "fp8":
        return "fp8_block" if quantization.group_size else "fp8"
    if quantization.outlier_share:
        return quantization.method
    if weights in ("int8", "int4") and (activations is None) == (weights == "int8"):
        return "w8a16" if activations is None else f"w4a8_{activations}"
    return weights


def refuse_formats(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
    """Raise UnsupportedError, with formats that work, for one refused on `hardware`. model: in its served formats."""
    for of, form, field, given in _formats(model, engine):
        if format_use(engine, hardware, form, of).support != "refused":
            continue
        what = "a KV cache" if of == "kv_cache" else "weights"
        works = ", ".join(allowed_formats(engine, hardware, of))
        raise UnsupportedError(
            f"got {given}, and {engine.described.label} does not take {what} in {_spoken(form)} on {_on(hardware)}; "
            f"{what} in {works} work there",
            reason="the engine does not take the number format on the device",
            field=field,
        )


def allowed_formats(engine: EngineSpec, hardware: HardwareSpec, of: FormatOf = "weights") -> list[str]:
    """Formats of weights or KV cache listed for `hardware`, as engine arguments."""
    listed = getattr(engine.described.facts, of)
    forms = [form for form in listed if format_use(engine, hardware, form, of).support not in ("refused", None)]
    if of == "kv_cache":
        return ["auto", *forms]
    plain = [form for form in ("bf16", "fp16") if format_use(engine, hardware, form).support != "refused"]
    return [_ARGUMENTS.get(form, form) for form in dict.fromkeys([*plain, *forms])]


def auto_dtype(dtype: str, model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> str:
    """Resolve `dtype` "auto" for `model`: the checkpoint's, or the device's 16-bit format for FP32 and for a 16-bit
    format that `engine` does not take on `hardware` (vLLM: `_resolve_auto_dtype` in vllm/config/model.py)."""
    if dtype != "auto":
        return dtype
    refused = format_use(engine, hardware, model.dtype).support == "refused"
    if model.dtype != "fp32" and not refused:
        return dtype
    has_bf16 = "bf16" in hardware.declared.peak_flops_per_s
    return "bfloat16" if has_bf16 and not refused else "float16"


def serving_notes(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> list[str]:
    """Notes on unmodelled encoders, acceptance from the catalog, formats multiplied in another. model: as served."""
    notes, dtype, peaks = [*model.encoder_notes], model.dtype, hardware.declared.peak_flops_per_s
    label, where = engine.described.label, _on(hardware)
    drafts = engine.speculative_config.acceptance if engine.speculative_config is not None else None
    if drafts is not None and drafts.catalog is not None:
        notes.append(drafts.catalog.note(model.name))
    if model.has_format_by_name and engine.quantization in (None, "auto"):
        notes.append(
            f"Weights in {model.quantization.method.upper()} by the name of the checkpoint alone: its config.json says "
            f"no format, and neither hf_quant_config.json nor weights lie beside it. Nor is it known what stays in "
            f"16 bits, or which format it has for KV."
        )
    if (engine.dtype, dtype) == ("auto", "fp16") and format_use(engine, hardware, "bf16").support == "refused":
        notes.append(f"Served in FP16: {label} does not take BF16 on {where}.")
    formats = ((form_of(own), own.activations) for own in _quantizations(model, engine))
    quantized = [(form, activations) for form, activations in formats if activations is not None]
    missing = sorted({matmul_rate(activations) for _, activations in quantized} - set(peaks))
    for of, form, _, _ in _formats(model, engine):
        use = format_use(engine, hardware, form, of)
        # A format that asks for quantized activations, which its kernel does without.
        if use.support == "weight_only" and form in dict(quantized):
            kernel = f" ({use.kernel})" if use.kernel else ""
            notes.append(
                f"{_spoken(form)} on {where} is weight-only in {label}{kernel}: weights are stored so and multiplied "
                f"in {dtype.upper()}."
            )
        elif use.support == "emulated":
            notes.append(
                f"{_spoken(form)} in the KV cache on {where} is emulated in {label}: stored so, converted before it is "
                f"multiplied."
            )
        elif use.support is None and of == "weights" and form not in peaks and missing:
            notes.append(
                f"{hardware.name} has no {missing[0].upper()} units and the description of {label} does not say "
                f"whether it takes {_spoken(form)} there: multiplied in the next wider format that the device has."
            )
    return list(dict.fromkeys(notes))


def _formats(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[FormatOf, str, str, str]]:
    """(of, format, field, value) of dtype, quantized weights and KV cache."""
    yield "weights", model.dtype, "engine.dtype", engine.dtype
    for place, quantization in enumerate(_quantizations(model, engine)):
        form, method = form_of(quantization), quantization.method
        if form is not None and place and engine.quantization_by_layer:
            yield "weights", form, "engine.quantization_by_layer", method
        elif form is not None:
            yield "weights", form, "engine.quantization", engine.quantization or f"{method} in the checkpoint"
    field = "kv_tiers" if engine.kv_tiers else "kv_cache_dtype"
    for name in [tier.dtype for tier in engine.kv_tiers] or [engine.kv_cache_dtype]:
        form = model.quantization.kv_cache if name == "auto" else kv_format(name)
        if form is not None and form != model.dtype:
            yield "kv_cache", form, f"engine.{field}", name


def _quantizations(model: ModelSpec, engine: EngineSpec) -> Iterator[QuantizationSpec]:
    yield model.quantization
    ruled = with_layer_formats(model, engine.quantization_by_layer)
    yield from dict.fromkeys(form for layer, _ in ruled.layers for _, form in layer.formats)


def _on(hardware: HardwareSpec) -> str:
    return f"{hardware.name} ({hardware.declared.architecture})"


def _spoken(form: str) -> str:
    return _SPOKEN.get(form, form.upper())
