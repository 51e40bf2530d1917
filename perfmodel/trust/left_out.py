"""Errors of predictions whose setup was left out of the fit: what to expect where no measured row is like the setup.

`hardware_specs/validated/left_out/errors.csv` has a line for each engine, what was left out, and metric; it is written
from the reports of cross-validation (`benchmarks/left_out_index.py`).
"""

__all__ = ["CUTS", "Cut", "LeftOutError", "left_out_errors", "measured_left_out"]

from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

from perfmodel.files.catalog import data_dir
from perfmodel.files.reach import read_rows

# What was left out of the fit, nearest first: a cell is a model in a number format under one version of an engine on a
# device; an architecture leaves no kernel times behind; with a datasheet nothing is fitted at all.
Cut = Literal["cell", "model", "device", "architecture", "datasheet"]
CUTS: tuple[Cut, ...] = ("cell", "model", "device", "architecture", "datasheet")


class LeftOutError(NamedTuple):
    """Errors of one metric with something left out.

    engine, devices: profile, and kind of devices (cpu, apu, apple, gpu); "" for any
    median, p90:     of |predicted / measured - 1| over the rows left out, or over their devices
    """

    engine: str
    left_out: Cut
    devices: str
    metric: str
    median: float
    p90: float
    report: str


@cache
def measured_left_out() -> tuple[LeftOutError, ...]:
    """All lines of the file."""
    return tuple(
        LeftOutError(
            line["engine"],
            line["left_out"],  # type: ignore[arg-type]
            line["devices"],
            line["metric"],
            float(line["median_error"]),
            float(line["p90_error"]),
            line["report"],
        )
        for line in read_rows(data_dir("validated") / "left_out" / "errors.csv")
    )


def left_out_errors(
    engine: str, devices: str, cut: Cut, errors: Iterable[LeftOutError] | None = None
) -> dict[str, tuple[float, float]]:
    """Metric -> (median, p90) to expect of an engine on a kind of device, with `cut` left out.

    devices: kind of devices, as `LeftOutError` has it
    errors:  in place of those of the file

    A more distant cut contains what a nearer one leaves out, so its error is at least as large: of all cuts up to
    `cut` the largest counts; without any, the nearest beyond. An engine that no report has takes the largest errors of
    all engines.
    """
    lines = [line for line in (measured_left_out() if errors is None else errors) if line.devices in ("", devices)]
    if any(line.engine == engine for line in lines):
        lines = [line for line in lines if line.engine in ("", engine)]
    reach = max(CUTS.index(cut), min((CUTS.index(line.left_out) for line in lines), default=0))
    errors_of: dict[str, tuple[float, float]] = {}
    for line in lines:
        if CUTS.index(line.left_out) <= reach:
            median, p90 = errors_of.get(line.metric, (0.0, 0.0))
            errors_of[line.metric] = max(median, line.median), max(p90, line.p90)
    return errors_of
