"""Records on disk: requests.csv and steps.csv as a run streams them, one line each, named as the columns are.

Floats are written with `repr`, so reading gives back the same bits. A run that was cut short leaves whole lines and
perhaps a last broken one, which is passed over.
"""

__all__ = ["read_requests", "read_steps"]

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import WorkloadError
from perfmodel.sim.records.columns import RequestColumns, StepColumns


def read_requests(path: Path) -> RequestColumns:
    """The finished requests in a file of this module or of the simulator's writer; further columns are ignored."""
    return RequestColumns(**_read(path, RequestColumns))


def read_steps(path: Path) -> StepColumns:
    """The step records in a file of this module or of the simulator's writer; further columns are ignored."""
    return StepColumns(**_read(path, StepColumns))


def _read(path: Path, kind: type[RequestColumns] | type[StepColumns]) -> dict[str, Any]:
    with path.open("rb") as file:
        header = file.readline().decode().strip().split(",")
        body = file.read()
    wanted = [column.name for column in fields(kind) if column.default is MISSING or column.name in header]
    missing = [name for name in wanted if name not in header]
    if missing:
        raise WorkloadError(f"{path}: has no column {missing[0]!r}, so it is no record file of perfmodel.")
    whole = body[: body.rfind(b"\n") + 1]  # a last line without its end was cut short
    is_float = [name.endswith("_s") for name in wanted]
    dtype = np.dtype(
        [(name, np.float64 if floats else np.int64) for name, floats in zip(wanted, is_float, strict=True)]
    )
    lines = whole.decode().splitlines()
    if not lines:
        return {name: np.empty(0, dtype[name]) for name in wanted}
    table = np.loadtxt(lines, delimiter=",", dtype=dtype, usecols=[header.index(name) for name in wanted], ndmin=1)
    return {name: np.ascontiguousarray(table[name]) for name in wanted}
