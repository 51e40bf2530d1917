"""The work of a kernel whose sizes a published figure gives, and how long it takes alone, without an engine around."""

__all__ = ["kernel_format", "kernel_time", "kernel_work"]

from dataclasses import replace

from perfmodel.cost import OperatorTime, OperatorTimer, load_calibration
from perfmodel.errors import SpecError
from perfmodel.models.architecture import MoEFFN
from perfmodel.models.formats.quantization import (
    BITS_PER_WEIGHT,
    bytes_per_weight,
    format_of_dtype,
    with_dtype,
    with_quantization,
)
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.prefill import Heads, flash_prefill, standard_prefill
from perfmodel.ops.collectives import all_reduce
from perfmodel.ops.feedforward import experts
from perfmodel.ops.formats import LinearFormat, linear_format
from perfmodel.ops.linear import gemm
from perfmodel.ops.routing import routing_of
from perfmodel.ops.work import Work
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.published.spec import KernelShape

_DTYPES = frozenset({"bf16", "bfloat16", "fp16", "float16", "fp32", "float32"})
# Names that tables of kernels use -> the engine's `quantization`.
_KERNEL_FORMATS = {"int4_wo": "w4a16", "int8_wo": "w8a16", "fp8_wo": "fp8_w8a16", "sq": "w8a8_int8"}
_STATIC = "_static"  # inputs that come quantized


def kernel_format(scenario: Scenario, format: str | None) -> LinearFormat:
    """The number format of a linear layer: a dtype (the scenario's unless given), or a name of `engine.quantization`.

    `_static` behind it says that the inputs come quantized, with scales known ahead of time.
    """
    model = scenario.model
    name = (format or model.dtype).lower()
    if name in _DTYPES:
        return linear_format(with_quantization(with_dtype(model, format_of_dtype(name)), "none"), "dense_ffn")
    is_static = name.endswith(_STATIC)
    name = name.removesuffix(_STATIC)
    quantized = with_quantization(_in_16_bits(model), _KERNEL_FORMATS.get(name, name))
    quantization = replace(quantized.quantization, kept=frozenset(), inputs_come_quantized=is_static)
    return linear_format(replace(quantized, quantization=quantization), "dense_ffn")


def _in_16_bits(model: ModelSpec) -> ModelSpec:
    return with_quantization(model if model.dtype in ("bf16", "fp16") else with_dtype(model, "bf16"), "none")


def kernel_work(scenario: Scenario, shape: KernelShape) -> Work:
    """The work of the kernel. Raises SpecError for an unknown format."""
    size = shape.size
    if shape.operator == "gemm":
        return gemm("gemm", size("m"), size("n"), size("k"), kernel_format(scenario, shape.format))
    if shape.operator == "moe":
        return _experts(scenario, shape)
    if shape.operator == "all_reduce":
        return all_reduce(shape.message_bytes or 0.0, size("ranks"))
    heads, batch, is_flash = _heads(scenario, shape), size("batch"), scenario.engine.attention == "flash"
    if shape.operator == "attention_decode":
        context = min(size("context"), shape.window) if shape.window else size("context")
        splits, fused = scenario.engine.split_kv, scenario.engine.fused_kernels
        return attention_decode(batch, batch * context, heads, splits_kv=splits, is_flash=is_flash, is_fused=fused)
    prompts = [(size("tokens"), size("cached", 0))] * batch
    if is_flash:
        return flash_prefill(prompts, heads)
    return standard_prefill(prompts, heads, is_fused=scenario.engine.fused_kernels)


def _heads(scenario: Scenario, shape: KernelShape) -> Heads:
    dtype = format_of_dtype(shape.format or _in_16_bits(scenario.model).dtype)
    kv_format = shape.kv_format or dtype
    if kv_format not in BITS_PER_WEIGHT:
        kv_format = format_of_dtype(kv_format)
    return Heads(
        num_heads=shape.size("heads"),
        num_kv_heads=shape.size("kv_heads", shape.size("heads")),
        head_dim=shape.size("head_dim"),
        v_head_dim=shape.size("v_head_dim", shape.size("head_dim")),
        dtype=dtype,
        element_bytes=bytes_per_weight(dtype),
        kv_element_bytes=bytes_per_weight(kv_format),
        window=shape.window,
    )


def _experts(scenario: Scenario, shape: KernelShape) -> Work:
    num_experts, top_k, ranks = shape.size("experts"), shape.size("top_k"), shape.size("expert_parallel")
    if top_k > num_experts or num_experts % ranks:
        raise SpecError(
            f"published.kernel: found top_k {top_k} of {num_experts} experts on {ranks} devices; allowed a top_k of at "
            f"most `experts`, and an `expert_parallel` that divides them."
        )
    ffn = MoEFFN(num_experts, top_k, shape.size("intermediate"), gated=shape.is_gated is not False)
    return experts(
        shape.size("tokens"),
        ffn,
        routing_of(scenario.routing, scenario.engine)(ffn, shape.size("tokens"), ranks),
        kernel_format(scenario, shape.format),
        width=shape.size("hidden"),
        intermediate=shape.size("intermediate"),
        local_experts=num_experts // ranks,
        is_fused=scenario.engine.fused_kernels,
    )


def kernel_time(scenario: Scenario, work: Work) -> OperatorTime:
    """How long `work` takes by the device's calibration, timed alone as tables of kernels are."""
    return OperatorTimer(scenario.hardware, load_calibration(scenario.hardware, scenario.engine.profile)).time(work)
