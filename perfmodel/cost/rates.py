"""Which declared rate does the work of a format that a device may not have, and where compute and memory balance."""

__all__ = ["FALLBACKS", "peak_flops_per_s", "ridge_point"]

from functools import lru_cache

from perfmodel.ops.formats import MMA_SYNC_RATE, SPARSE_RATE
from perfmodel.specs.hardware import HardwareSpec

# A format that the device lacks is converted to the next wider one that it has (weight-only kernels: Marlin's FP8 on
# Ampere, int4 everywhere); narrower integers never replace floats. The last resort is the fastest declared rate.
FALLBACKS: dict[str, tuple[str, ...]] = {
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "fp6": ("fp8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int4": ("int8", "fp8", "bf16", "fp16", "fp32"),
    "int8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp16_acc16": ("fp16", "bf16", "fp32"),  # as fast as with FP32 sums where nothing else is declared
    "tf32": ("fp32",),
    "fp32": ("tf32", "bf16", "fp16"),
}
# Of the tensor peak that mma.sync reaches where tensor cores take WGMMA: Shah et al. 2024 (FlashAttention-3), section 1
# and blog: "about two-thirds of the peak throughput of the Hopper Tensor Cores". Elsewhere it is the instruction.
_MMA_SYNC_SHARE = {"hopper": 2 / 3}
_VECTOR_SHARE = 1 / 16  # of the bf16 rate, where neither a vector nor an fp32 rate is declared (A100: 19.5 of 312)


@lru_cache(maxsize=4096)
def _peak(rates: tuple[tuple[str, float], ...], vector: float | None, rate: str) -> float:
    declared = dict(rates)
    if rate == "vector":
        return vector or declared.get("fp32") or max(declared.values()) * _VECTOR_SHARE
    for name in (rate, *FALLBACKS.get(rate, ("bf16", "fp16", "fp32"))):
        if name in declared:
            return declared[name]
    return max(declared.values())


def peak_flops_per_s(hardware: HardwareSpec, rate: str) -> float:
    """The dense peak that `rate` runs at: as declared, or that of the format it falls back to (FALLBACKS).

    "vector" is the non-tensor rate: `vector_flops_per_s`, else fp32. "bf16@2:4" is bf16 times `sparsity_speedup`.
    """
    declared = hardware.declared
    if rate.endswith(MMA_SYNC_RATE):
        share = _MMA_SYNC_SHARE.get(declared.architecture or "", 1.0)
        return share * peak_flops_per_s(hardware, rate.removesuffix(MMA_SYNC_RATE))
    if rate.endswith(SPARSE_RATE):
        return declared.sparsity_speedup * peak_flops_per_s(hardware, rate.removesuffix(SPARSE_RATE))
    return _peak(tuple(declared.peak_flops_per_s.items()), declared.vector_flops_per_s, rate)


def ridge_point(hardware: HardwareSpec, rate: str = "bf16") -> float:
    """FLOP per HBM byte at which compute and memory take equally long (A100 80 GB, bf16: 312e12 / 2039e9 = 153)."""
    return peak_flops_per_s(hardware, rate) / hardware.memory_bandwidth
