"""Measured matrix multiplications (`gemm`): which kernel a row ran, its sizes, and the fit of its form.

Columns: m, n, k, gemm_dtype, kernel_source, engine_version. Rows of one engine, number format and kernel are fitted
together. Most are replayed from CUDA graphs; kernels marked `is_eager` were launched one by one, which puts a floor
under their times that serving does not have.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.gemm import GemmSizes, TiledGemmFit, TileStep, gemm_seconds
from perfmodel.evidence.fit.forms import fit_group
from perfmodel.evidence.sources.kernels import WEIGHT_FORMATS, Group, KernelTable, WeightFormat, engine_name
from perfmodel.ops.extents import GemmExtent

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

OP = "gemm"


# CUTLASS without a tuned choice: vLLM's scaled-mm dispatch for Hopper, TensorRT-LLM's blockwise FP8 kernel.
_CUTLASS_TILES = (TileStep(64, 64, 64), TileStep(128, 64, 128), TileStep(0, 128, 128))


@dataclass(frozen=True)
class _Kernel:
    """What is known of a kernel from its code or from how it was timed.

    variant: a suffix of the calibration key, where an engine runs several kernels for one format; serving uses the
             fit without one
    """

    source: str  # how `kernel_source` starts; "" matches all
    engine: str
    format: str = ""  # "" matches all
    tile_rule: tuple[TileStep, ...] = ()
    is_eager: bool = False
    variant: str = ""


# The first match counts. vLLM picks among its three kernels for blockwise FP8 by shape: FlashInfer for few rows,
# CUTLASS where N or K is no multiple of 64 or 128, DeepGEMM for the rest. The eager floor hides what the first two do
# on the device, so serving takes DeepGEMM's parameters for all.
_KERNELS = (
    _Kernel("CutlassFP8Scaled", "vllm", "fp8", tile_rule=_CUTLASS_TILES),
    _Kernel("DeepGemm", "vllm", "fp8_block", is_eager=True),
    _Kernel("FlashInfer", "vllm", "fp8_block", is_eager=True, variant="flashinfer"),
    _Kernel("Cutlass", "vllm", "fp8_block", is_eager=True, variant="cutlass"),
    _Kernel("", "trtllm", "fp8_block", tile_rule=_CUTLASS_TILES),
    _Kernel("", ""),
)
_FREE = ("launch_s", "compute_fraction", "memory_fraction", "feed_edge", "knee", "tile_s", "wave_quantization")
_STARTS: tuple[dict[str, float], ...] = (
    {"knee": 4.0, "tile_s": 2.5e-6, "wave_quantization": 0.8, "feed_edge": 60.0},
    {"knee": 4.0, "tile_s": 8e-7, "wave_quantization": 0.02, "feed_edge": 60.0},
    {"knee": 2.0, "tile_s": 1e-6, "wave_quantization": 0.9},
    {"knee": 1.5, "tile_s": 5e-7, "wave_quantization": 0.5, "compute_fraction": 0.7},
)
_REPLAYED_S = 4e-6  # launches of a quantizing kernel and a GEMM in a CUDA graph, where only eager times are known
_MOST_ROWS = 3000  # of a fit


def sizes_of(table: KernelTable, form: WeightFormat) -> GemmSizes:
    """The sizes of rows of one number format."""
    m, n, k = (np.asarray(table[name], dtype=np.float64) for name in ("m", "n", "k"))
    moved = n * k * form.weight_bytes + m * k * form.input_bytes + m * n * 2.0
    extent = GemmExtent(m, n, k, form.weight_bytes, form.input_bytes, m * k * form.quantized_bytes)
    return GemmSizes(extent, moved, form.rate)


def is_too_fast(group: Group, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows that beat the declared tensor rate or bandwidth: operands stayed in L2, or something else was timed."""
    sizes: GemmSizes = group.sizes
    flops = 2.0 * sizes.extent.m * sizes.extent.n * sizes.extent.k
    fastest = np.maximum(flops / device.peak(sizes.rate), sizes.moved_bytes / device.bandwidth)
    return np.asarray(group.seconds < fastest)


def groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, number format and kernel. Rows of formats without a known meaning are in none."""
    values: dict[tuple[str, str, str], list[Rows]] = {}
    for (version, dtype, source), rows in table.groups(("engine_version", "gemm_dtype", "kernel_source")):
        if dtype in WEIGHT_FORMATS:
            engine = engine_name(version)
            kernel = _kernel(source, engine, WEIGHT_FORMATS[dtype].name)
            key = "/".join(filter(None, ("gemm", WEIGHT_FORMATS[dtype].name, kernel.variant)))
            values.setdefault((engine, key, dtype), []).append(rows)
    result = []
    for (engine, key, dtype), parts in values.items():
        rows = np.concatenate(parts)
        part = table.take(rows)
        result.append(Group(engine, key, sizes_of(part, WEIGHT_FORMATS[dtype]), part.seconds, rows))
    return result


def fit(group: Group, device: DeviceFacts) -> TiledGemmFit:
    """The parameters of one kernel, from the rows that do not beat the hardware."""
    start, free, starts = _start(group)
    usable = group.take(~is_too_fast(group, device))
    return fit_group(usable, _seconds, start, device, free=free, starts=starts, most_rows=_MOST_ROWS)


def predict(group: Group, fit: TiledGemmFit, device: DeviceFacts) -> Floats:
    """Seconds of each row, timed as the table was."""
    return _seconds(group.sizes, fit, device)


def _seconds(sizes: GemmSizes, fit: TiledGemmFit, device: DeviceFacts) -> Floats:
    duration: Floats = gemm_seconds(sizes, fit, device, is_eager=True).duration
    return duration


def _kernel(source: str, engine: str, format: str) -> _Kernel:
    return next(
        kernel
        for kernel in _KERNELS
        if source.startswith(kernel.source) and kernel.engine in ("", engine) and kernel.format in ("", format)
    )


def _start(group: Group) -> tuple[TiledGemmFit, tuple[str, ...], tuple[dict[str, float], ...]]:
    """The kernel's rules, the parameters that its rows determine, and where the search begins."""
    _, format, *variant = group.key.split("/")
    kernel = next(
        kernel
        for kernel in _KERNELS
        if kernel.engine in ("", group.engine) and kernel.format in ("", format) and kernel.variant == "".join(variant)
    )
    fastest = float(np.quantile(group.seconds, 0.01))
    free: tuple[str, ...] = _FREE
    changes = {"launch_s": 0.9 * fastest}
    if not kernel.tile_rule:
        free = (*free, "split_s")
    if group.sizes.extent.quantized_bytes.any():
        free = (*free, "quantize_fraction", "quantize_row_s")
    if kernel.is_eager:
        free = (*free[1:], "eager_launch_s", "eager_floor_s")
        changes = {"launch_s": _REPLAYED_S, "eager_launch_s": 0.2 * fastest, "eager_floor_s": fastest}
    start = TiledGemmFit(tile_rule=kernel.tile_rule).model_copy(update=changes)
    return start, free, tuple({**changes, **item} for item in _STARTS)
