"""`Residuals`: what a fit leaves unexplained, the source of prediction intervals."""

__all__ = ["Residuals"]

from perfmodel.files.base import Spec


class Residuals(Spec):
    """Quantiles of log(measured / predicted) over the rows of the fit: exp(p90) - 1 is how far one in ten is above."""

    num_rows: int = 0
    p10: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
