"""What the tables of attention kernels have in common: columns as numbers, names of number formats and of engines."""

__all__ = ["bytes_of", "engine_name", "format_bytes", "format_name", "kernel_groups", "numbers"]

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.kernels.tables import Group, KernelTable

_FORMATS = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "nvfp4": 0.5}


def numbers(table: KernelTable, name: str, missing: float = 0.0) -> NDArray[np.float64]:
    """A column as floats; `missing` where there is no such column, or no value in it."""
    if name not in table.columns:
        return np.full(len(table), missing)
    return np.nan_to_num(np.asarray(table[name], dtype=np.float64), nan=missing)


def format_name(name: str) -> str:
    """The number format as `peak_flops_per_s` calls it."""
    return _FORMATS.get(name, name)


def bytes_of(name: str) -> float:
    """Bytes per element of a number format; 2 for those unknown."""
    return _BYTES.get(format_name(name), 2.0)


def format_bytes(table: KernelTable, name: str) -> NDArray[np.float64]:
    """Bytes per element of a column of number formats; 2 for those unknown."""
    names, which = np.unique(table[name].astype(str), return_inverse=True)
    return np.array([bytes_of(str(each)) for each in names])[which]


def engine_name(version: str) -> str:
    """The engine of "vllm 0.14.0"."""
    return version.split()[0]


def kernel_groups(
    table: KernelTable,
    family: str,
    usable: NDArray[np.int64],
    kernels: Callable[[KernelTable], NDArray[np.str_]],
    sizes_of: Callable[[KernelTable], Any],
) -> list[Group]:
    """One group of the `usable` rows per engine, kernel, number formats and head size.

    kernels: the kernel of each row; sizes_of: the sizes of rows of one kernel
    """
    part = table.take(usable)
    part = KernelTable(table.system, table.op, {**part.columns, "kernel": kernels(part)})
    found = []
    for names, rows in part.groups(("engine_version", "kernel", "attn_dtype", "kv_cache_dtype", "head_dim")):
        engine, kernel, rate, kv_format, head_dim = names
        key = f"{family}/{format_name(rate)}/kv_{format_name(kv_format)}/hd{float(head_dim):.0f}/{kernel}"
        one = part.take(rows)
        found.append(Group(engine_name(engine), key, sizes_of(one), one.seconds, usable[rows]))
    return found
