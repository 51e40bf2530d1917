"""Whole modules and kernels outside the other forms: sparse and compressed attention with their projections and
indexers, recurrent mixers, scaling of inputs.

    t = max(floor + host launches, launch + projections + attention + activations + serial steps)

    projections = max( 2 M' w / (gemm_fraction F_w),  w e / (weight_fraction W) )         M' = 64 ceil(M / 64)
    attention   = knee( A / (tensor_fraction F f) + I / (index_fraction F f),  cached bytes / (kv_fraction W f) )
    activations = bytes / (memory_fraction W), those that L2 holds `cache_speedup` times as fast
    f           = min(1, block_share blocks / SM)

M tokens, w weights of e bytes at the tensor rate F_w; A FLOPs of attention or of a recurrence and I of an indexer, both
at the 16-bit rate F, in so many thread blocks; `steps` follow one another (chunks of a recurrence). W, F and SM as
declared. Parts that few rows tell apart share what they take: the sum means more than each."""

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import Domain, KernelSeconds, Residuals
from perfmodel.cost.kernel_models.gemm import cached_share, knee_of
from perfmodel.files.base import Spec
from perfmodel.ops.problem_sizes import Values
from perfmodel.ops.work import Work

_TILE_ROWS = 64
_NOTHING_S = 1e-12


class ModuleFit(Spec):
    """One module under an engine. Times in seconds; fractions of the declared peaks."""

    form: Literal["module"] = "module"
    domain: Domain = Domain()
    launch_s: float = Field(default=2e-5, ge=5e-7, le=5e-3)
    gemm_fraction: float = Field(default=0.5, ge=0.02, le=1.0)
    weight_fraction: float = Field(default=0.6, ge=0.02, le=1.0)
    tensor_fraction: float = Field(default=0.3, ge=0.002, le=2.0)  # above 1: fewer FLOPs than counted, or FP8
    index_fraction: float = Field(default=0.5, ge=0.005, le=4.0)
    kv_fraction: float = Field(default=0.5, ge=0.005, le=8.0)  # above 1: from L2
    memory_fraction: float = Field(default=0.5, ge=0.01, le=1.0)
    cache_speedup: float = Field(default=1.0, ge=1.0, le=8.0)
    block_share: float = Field(default=1.0, ge=0.05, le=10.0)
    step_s: float = Field(default=1e-8, ge=1e-10, le=1e-3)
    floor_s: float = Field(default=1e-6, ge=5e-7, le=1e-2)
    host_s: float = Field(default=1e-9, ge=1e-9, le=1e-4)  # of one of `launches`
    on_own_host: float = Field(default=1.0, ge=0.3, le=4.0)  # of launch and floor, where the CPU is the GPU maker's
    knee: float = Field(default=2.0, ge=1.0, le=10.0)
    residuals: Residuals = Residuals()


class ModuleSizes(NamedTuple):
    """Many calls of one module, as columns; see the formula. weights: elements; weight_bytes: of each; rate: the peak
    rate of the projections"""

    tokens: Values
    weights: Values
    weight_bytes: Values
    attention_flops: Values
    index_flops: Values
    cached_bytes: Values
    activation_bytes: Values
    blocks: Values
    steps: Values
    launches: Values
    rate: str


def module_seconds(sizes: ModuleSizes, fit: ModuleFit, device: DeviceFacts) -> KernelSeconds:
    """The formula of this module over columns."""
    bandwidth, peak = device.bandwidth, device.peak("bf16")
    rows = np.ceil(sizes.tokens / _TILE_ROWS) * _TILE_ROWS
    multiplied = 2 * rows * sizes.weights / (fit.gemm_fraction * device.peak(sizes.rate))
    read = sizes.weights * sizes.weight_bytes / (fit.weight_fraction * bandwidth)
    fill = np.minimum(1.0, fit.block_share * np.maximum(sizes.blocks, 1.0) / device.compute_units)
    products = sizes.attention_flops / fit.tensor_fraction + sizes.index_flops / fit.index_fraction
    compute = products / (peak * fill)
    cached = sizes.cached_bytes / (fit.kv_fraction * bandwidth * fill)
    attention = knee_of(compute + _NOTHING_S, cached, fit.knee)
    hit = cached_share(sizes.activation_bytes, device) * (1.0 - 1.0 / fit.cache_speedup)
    moved = sizes.activation_bytes * (1.0 - hit) / (fit.memory_fraction * bandwidth)
    host = fit.on_own_host if device.has_own_host else 1.0
    whole = fit.launch_s * host + np.maximum(multiplied, read) + attention + moved + fit.step_s * sizes.steps
    waits = fit.floor_s * host + fit.host_s * sizes.launches
    return KernelSeconds(np.maximum(waits, whole), multiplied + compute, read + cached + moved)


def module_time(work: Work, fit: ModuleFit, device: DeviceFacts) -> OperatorTime:
    """The time of the attention of such a module, whose projections are operators of their own."""
    none, values = np.zeros(1), (work.flops, 0.0, work.kv_bytes, work.activation_bytes + work.weight_bytes)
    flops, index_flops, cached, moved = (np.full(1, value) for value in values)
    blocks = none + device.compute_units
    sizes = ModuleSizes(none, none, none, flops, index_flops, cached, moved, blocks, none, none, work.rate)
    parts = module_seconds(sizes, fit.model_copy(update={"floor_s": 0.0}), device)
    return OperatorTime.of(*(float(part[0]) for part in parts))
