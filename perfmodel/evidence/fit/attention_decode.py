"""Measured decode attention (`generation_attention`): which kernel a row ran, its sizes, and the fit of its form.

Columns: batch_size, num_heads, num_key_value_heads, head_dim, step (tokens already in the cache), window_size (0 or
NaN: none), attn_dtype, kv_cache_dtype, kernel_source, engine_version. Rows of one kernel, head size and KV format are
fitted together, whatever their window.
"""

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.attention.decode import DecodeKernel, DecodeSizes, FlashDecodeFit, decode_seconds
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Domain
from perfmodel.evidence.fit.forms import fit_group
from perfmodel.evidence.sources.kernels import Group, KernelTable, bytes_of, format_bytes, kernel_groups, numbers
from perfmodel.ops.extents import DecodeExtent, HeadsExtent
from perfmodel.specs.architectures import find_architecture

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

OP = "generation_attention"

_MMHA_ABOVE = 32  # TensorRT-LLM: larger groups, and single heads, run the kernel without tensor cores
_GROUPS = {"mmha": ((1, 1), (_MMHA_ABOVE + 1, 4096)), "xqa": ((2, _MMHA_ABOVE),), "xqa_fp8": ((2, _MMHA_ABOVE),)}
_KERNELS = {
    "flash2": DecodeKernel(splits_mha=False, is_balanced=False, window_overlap=128),
    "flash3": DecodeKernel(split_share=1.1, window_overlap=128),
    "flash3_sm80": DecodeKernel(split_tokens=128, whole_splits=True, pays_splits=True, window_overlap=128),
    "xqa": DecodeKernel(split_tokens=128, split_waves=8, whole_splits=True, splits_window=True, pays_splits=True),
    "xqa_fp8": DecodeKernel(split_tokens=256),  # Hopper's own: one wave of splits
    "mmha": DecodeKernel(heads_per_block=1, rows=1, split_waves=1.5, splits_window=True, pays_splits=True),
}
_COMMON = ("launch_s", "memory_fraction", "block_s", "block_bandwidth", "knee", "doubling_s")
_FREE = {
    "flash2": (*_COMMON, "group_traffic", "swap_s"),
    "xqa": (*_COMMON, "group_traffic", "group_block"),
    "xqa_fp8": (*_COMMON, "group_traffic", "group_block"),
    "mmha": (*_COMMON, "combine_s", "cache_speedup"),
}
_FREE_ELSE = (*_COMMON, "group_traffic", "cache_speedup")
_STARTS: tuple[dict[str, float], ...] = (
    {},
    {"block_s": 1e-6, "knee": 1.1},
    {"launch_s": 4e-6, "block_s": 6e-6, "block_bandwidth": 0.6},
)
_MOST_BANDWIDTH = 0.95  # no kernel streams more of the declared peak; what says so timed something else
_BEYOND_CACHE = 1.5  # times L2: smaller KV may have come from there


def kernel_names(table: KernelTable, device: DeviceFacts) -> NDArray[np.str_]:
    """The kernel of each row, a key of `_KERNELS` where it is known, else the library's name for it.

    SGLang's FlashAttention-3 is another kernel before Hopper. TensorRT-LLM has two, picked by the size of the group.
    """
    source = table["kernel_source"].astype(str)
    has_wgmma = find_architecture(device.hardware.declared.architecture).has_wgmma
    known = {
        "vllm_flash_attn": "flash2",
        "vllm_flash_attn_fa3": "flash3",
        "flash_attention": "flash3" if has_wgmma else "flash3_sm80",
    }
    names = np.array([known.get(name, name) for name in source], dtype="U32")
    group = numbers(table, "num_heads") / numbers(table, "num_key_value_heads")
    is_mmha = (group < 2) | (group > _MMHA_ABOVE)
    xqa = np.where(has_wgmma & (format_bytes(table, "kv_cache_dtype") == 1), "xqa_fp8", "xqa")
    return np.where(source == "torch_flow", np.where(is_mmha, "mmha", xqa), names)


def sizes_of(table: KernelTable) -> DecodeSizes:
    """The sizes of each row."""
    batch, heads = numbers(table, "batch_size"), numbers(table, "num_heads")
    kv_heads, head_dim = numbers(table, "num_key_value_heads"), numbers(table, "head_dim")
    kv_bytes = format_bytes(table, "kv_cache_dtype")
    new_token = kv_heads * head_dim * (2 + kv_bytes)  # read in 2 bytes, written into the cache
    length = numbers(table, "step") + 1
    return DecodeSizes(
        DecodeExtent(
            HeadsExtent(heads, kv_heads, head_dim, head_dim, kv_bytes, numbers(table, "window_size")),
            num_seqs=batch,
            kv_tokens=batch * length,
        ),
        length,
        kv_token_bytes=2 * kv_heads * head_dim * kv_bytes,
        io_bytes=batch * (2 * 2 * heads * head_dim + 2 * new_token),
        flops_per_token=4 * head_dim,
    )


def is_too_fast(table: KernelTable, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows whose KV, too large for L2, would have been read faster than the declared memory delivers."""
    sizes = sizes_of(table)
    window = sizes.extent.heads.window
    visible = np.where(window > 0, np.minimum(sizes.length, window), sizes.length)
    kv_bytes = sizes.extent.num_seqs * visible * sizes.kv_token_bytes
    fastest = kv_bytes / (_MOST_BANDWIDTH * device.bandwidth)
    return np.asarray((kv_bytes > _BEYOND_CACHE * device.l2_bytes) & (table.seconds < fastest))


def groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, kernel, number formats and head size; rows that beat the hardware are left out."""
    usable = np.flatnonzero(~is_too_fast(table, device))
    return kernel_groups(table, "attention_decode", usable, lambda part: kernel_names(part, device), sizes_of)


def fit(group: Group, device: DeviceFacts) -> FlashDecodeFit:
    """The parameters of one kernel."""
    start, free = _start(group.key)
    return fit_group(group, _seconds, start, device, free=free, starts=_STARTS, most_rows=2500)


def predict(group: Group, fit: FlashDecodeFit, device: DeviceFacts) -> Floats:
    """Seconds of each row, measured as benchmarks do: repeated, so that small KV stays in L2."""
    return _seconds(group.sizes, fit, device)


def _seconds(sizes: DecodeSizes, fit: FlashDecodeFit, device: DeviceFacts) -> Floats:
    return np.asarray(decode_seconds(sizes, fit, device, is_warm=True).duration)


def _start(key: str) -> tuple[FlashDecodeFit, tuple[str, ...]]:
    """The kernel's rules and domain, and the parameters that its rows determine."""
    _, _, kv_format, head_dim, kernel = key.split("/")
    domain = Domain(
        head_dim=int(head_dim.removeprefix("hd")),
        kv_element_bytes=bytes_of(kv_format.removeprefix("kv_")),
        groups=_GROUPS.get(kernel, ()),
    )
    start = FlashDecodeFit(kernel=_KERNELS.get(kernel, DecodeKernel()), domain=domain)
    return start, _FREE.get(kernel, _FREE_ELSE)
