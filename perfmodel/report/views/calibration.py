"""A calibration as a document: what was fitted for each family of operators, and how far steps are from the fit."""

__all__ = ["calibration_view"]

from collections.abc import Iterator
from math import exp
from typing import Any

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.report.document import Block, Document, Paragraph, Table


def calibration_view(calibration: Calibration) -> Document:
    """Fractions of the declared peak, times per kernel or item; zeros left out."""
    fits = {**calibration.families, "all others": calibration.default}
    rows = [(family, ", ".join(_parameters(fit.model_dump(exclude={"residuals"})))) for family, fit in fits.items()]
    blocks: list[Block] = [Table(("operators", "fitted"), rows, left=2)]
    spread = calibration.step_residuals
    if spread.num_rows:
        low, high = exp(spread.p10) - 1, exp(spread.p90) - 1
        blocks.append(
            Paragraph(f"80 % of {spread.num_rows:,} steps measured within {low:+.1%} and {high:+.1%} of the fit.")
        )
    return Document(f"{calibration.device} running {calibration.engine}", blocks, calibration.source)


def _parameters(parameters: dict[str, Any]) -> Iterator[str]:
    """`memory 71.0 % of peak`, `overhead 2.31 µs`"""
    for name, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1e-12:
            continue
        if name.endswith("_fraction"):
            yield f"{name.removesuffix('_fraction')} {value:.1%} of peak"
        elif name.endswith("_s"):
            yield f"{name.removesuffix('_s').replace('_', ' ')} {value * 1e6:.2f} µs"
        else:
            yield f"{name.replace('_', ' ')} {value:.3g}"
