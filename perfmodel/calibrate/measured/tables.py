"""Measured kernels as the tables that forms are fitted to: one table per kind of kernel, columns by the tables' names.

Operators with a form of their own keep their sizes; all others are small kernels, which move bytes and are launched.
What multiplies matrices and has no form was measured to be compared with (the standard attention) and is in neither.
"""

__all__ = ["TABLES", "kernel_tables", "small_kernels"]

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from perfmodel.calibrate.kernels.tables import KernelTable
from perfmodel.calibrate.measured.records import KernelRecord, Size
from perfmodel.ops.work import Work

# Operator -> the table that its sizes fit into, and the columns that are the same in all its rows.
TABLES: Mapping[str, tuple[str, dict[str, Size]]] = MappingProxyType(
    {
        "attention_decode": ("generation_attention", {"attn_dtype": "bfloat16", "window_size": 0, "beam_width": 1}),
        "attention_prefill": ("context_attention", {"attn_dtype": "bfloat16", "window_size": 0, "step": 0}),
        "grouped_experts": ("moe", {"moe_tp_size": 1, "moe_ep_size": 1, "distribution": "balanced"}),
        "linear": ("gemm", {"gemm_dtype": "bfloat16"}),
        "linear_fp8": ("gemm", {"gemm_dtype": "fp8"}),
        "linear_w4a16": ("gemm", {"gemm_dtype": "int4_wo"}),
        "linear_w8a8": ("gemm", {"gemm_dtype": "int8"}),
        "linear_w8a16": ("gemm", {"gemm_dtype": "int8_wo"}),
    }
)
_OF_ALL = {"engine_version": "perfmodel", "kernel_source": "triton"}
_SMALL_RATES = ("vector", "")
_LEAST_BYTES = 1.0  # of a small kernel: what moves nothing says nothing about the bandwidth


def kernel_tables(records: Sequence[KernelRecord], system: str) -> list[tuple[KernelTable, list[int]]]:
    """(table, numbers of its records) for each kind of kernel that was measured."""
    rows: dict[str, list[dict[str, Any]]] = {}
    numbers: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        if record.operator in TABLES:
            name, defaults = TABLES[record.operator]
            row = {**_OF_ALL, **defaults, **record.sizes, "latency_ms": record.seconds * 1e3}
            rows.setdefault(name, []).append(row)
            numbers.setdefault(name, []).append(number)
    return [(_table(system, name, found), numbers[name]) for name, found in rows.items()]


def small_kernels(records: Sequence[KernelRecord]) -> list[tuple[Work, float, int]]:
    """(work, seconds, number of the record) of the operators without a form of their own."""
    return [
        (
            Work(record.operator, "elementwise", record.flops, rate="vector", activation_bytes=record.bytes),
            record.seconds,
            number,
        )
        for number, record in enumerate(records)
        if record.operator not in TABLES and record.rate in _SMALL_RATES and record.bytes >= _LEAST_BYTES
    ]


def _table(system: str, op: str, rows: Sequence[dict[str, Any]]) -> KernelTable:
    """Columns of all names that occur; a number that a row does not have is 0."""
    names = sorted({name for row in rows for name in row})
    return KernelTable(system, op, {name: np.array([row.get(name, 0) for row in rows]) for name in names})
