"""What calls of a kernel in one run err alike by, from kernel tables: residuals fall into shapes, which a model has few
of, and sizes within a shape, which its steps go through.

With the residual of a row the sum of its shape's and its size's, independent of each other (one-way random effects;
Searle, Casella and McCulloch, Variance Components, 1992, chapter 3), the variance of shapes is that of their means less
what sizes leave in a mean. Products of a layer with its four matrices (q, k and v in one, output, gate and up in one,
down) have four shapes: their mean has half the standard deviation of one.
"""

__all__ = ["common_share", "fit_kernel_errors"]

from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.kernels.systems import module_of
from perfmodel.calibrate.kernels.tables import Column, KernelTable, op_of, read_table, table_files, understood
from perfmodel.cost import load_calibration
from perfmodel.cost.calibrations.for_all import KernelErrors
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.errors import SpecError
from perfmodel.specs import load_hardware

Floats = NDArray[np.float64]

# What a model and its shards fix of a table's rows; batches, lengths and tokens vary in a run.
_SHAPES = {
    "context_attention": ("num_heads", "num_key_value_heads", "window_size"),
    "context_mla": ("num_heads", "tp_size"),
    "gemm": ("n", "k"),
    "generation_attention": ("num_heads", "num_key_value_heads", "window_size"),
    "generation_mla": ("num_heads", "tp_size"),
    "mla_context_module": ("model", "num_heads", "tp_size"),
    "mla_generation_module": ("model", "num_heads", "tp_size"),
    "moe": ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution"),
}
_SHAPES_IN_A_LAYER = {"gemm": 4}
_LEAST_SHAPES = 5


def fit_kernel_errors(folder: str | Path) -> KernelErrors:
    """The share of each family: the mean over the kernels that the calibrations have a fit of.

    folder: of kernel tables `<system>/<op>`. Raises SpecError for one without such kernels.
    """
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for file in table_files(folder):
        if op_of(file) in _SHAPES:
            with understood(file):
                for family, share in _shares(read_table(file)):
                    shares[family].append(share)
    if not shares:
        raise SpecError(f"{folder}: has no table of kernels with a fit and {_LEAST_SHAPES} shapes or more.")
    return KernelErrors(common={family: round(float(np.mean(found)), 3) for family, found in sorted(shares.items())})


def _shares(table: KernelTable) -> list[tuple[str, float]]:
    """(family, share) of each kernel of a table with a fit of its own and enough shapes."""
    hardware, module = load_hardware(table.system), module_of(table.op)
    assert module is not None
    device, found = DeviceFacts.of(hardware), []
    for group in module.groups(table, device):
        fit = load_calibration(hardware, group.engine).families.get(group.key)
        shapes = _shape_numbers(table.take(group.rows))
        if fit is None or len(np.unique(shapes)) < _LEAST_SHAPES:
            continue
        share = common_share(np.log(module.predict(group, fit, device) / group.seconds), shapes)
        family = group.key.split("/")[0]
        found.append((family, share / _SHAPES_IN_A_LAYER.get(family, 1) ** 0.5))
    return found


def _shape_numbers(table: KernelTable) -> Column:
    """A number for each row, equal where shapes are."""
    names = [name for name in _SHAPES[table.op] if name in table.columns]
    numbered = np.stack([np.unique(table[name], return_inverse=True)[1] for name in names])
    return np.asarray(np.unique(numbered, axis=1, return_inverse=True)[1])


def common_share(residuals: Floats, shapes: Column) -> float:
    """Standard deviation of what shapes err by over that of all residuals, from 0 to 1.

    residuals: log(predicted / measured) of rows; shapes: the shape of each, as a number
    """
    _, number, counts = np.unique(shapes, return_inverse=True, return_counts=True)
    means = np.bincount(number, residuals) / counts
    within = float(np.sum((residuals - means[number]) ** 2)) / max(1, len(residuals) - len(counts))
    between = max(0.0, float(np.var(means, ddof=1)) - within * float(np.mean(1 / counts)))
    return float((between / (between + within)) ** 0.5) if between else 0.0
