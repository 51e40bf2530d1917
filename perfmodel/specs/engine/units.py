"""What an engine's arguments ask of a device's units, and the sentence where it has none."""

__all__ = ["refuse_missing_units"]

from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec


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
