"""Measured exchanges of expert parallelism: a CSV with a row for each size and direction.

Columns: device, exchange (dispatch or combine), ranks, payload_bytes (what a rank sends to all), latency_us. All ranks
are joined by a switch. The start between nodes is not in such rows: it stays what it was.
"""

__all__ = ["ExchangeRow", "fit_exchanges", "read_exchanges"]

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.origins import MALFORMED
from perfmodel.calibrate.robust import fit_form, residuals_of
from perfmodel.cost.calibrations.for_all import ExchangeFits
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.messages import ExchangeFit
from perfmodel.errors import SpecError
from perfmodel.files.reach import read_rows
from perfmodel.specs import load_hardware

Floats = NDArray[np.float64]
_FREE = ("floor_s", "start_s", "link_fraction")
_FEWEST = 6  # rows of a direction, twice the parameters


class ExchangeRow(NamedTuple):
    """One measured exchange; wire_s: what its bytes take at the declared rate of the link."""

    exchange: str
    wire_s: float
    seconds: float


def read_exchanges(path: str | Path) -> list[ExchangeRow]:
    """The rows of a table. Raises SpecError for what cannot be read, or has no such columns."""
    try:
        return [_row(cells) for cells in read_rows(Path(path))]
    except (OSError, *MALFORMED) as error:
        raise SpecError(f"{path}: is no table of exchanges: {str(error).splitlines()[0]}.") from None


def _row(cells: dict[str, str]) -> ExchangeRow:
    ranks, rate = int(cells["ranks"]), DeviceFacts.of(load_hardware(cells["device"])).link_bandwidth
    wire_s = float(cells["payload_bytes"]) * (ranks - 1) / ranks / rate
    return ExchangeRow(cells["exchange"], wire_s, float(cells["latency_us"]) * 1e-6)


def fit_exchanges(rows: Sequence[ExchangeRow], begin: ExchangeFits) -> ExchangeFits:
    """`begin` with what the rows of each direction say. Raises SpecError for a direction with too few of them."""
    found = {name: _fit(name, rows, getattr(begin, name)) for name in ("dispatch", "combine")}
    return begin.model_copy(update=found)


def _fit(exchange: str, rows: Sequence[ExchangeRow], begin: ExchangeFit) -> ExchangeFit:
    mine = [row for row in rows if row.exchange == exchange]
    if len(mine) < _FEWEST:
        raise SpecError(f"found {len(mine)} rows of exchange {exchange}; a fit needs at least {_FEWEST} of each.")
    wire_s, measured = (np.array([getattr(row, name) for row in mine]) for name in ("wire_s", "seconds"))

    def seconds(candidate: ExchangeFit, chosen: NDArray[np.int64]) -> Floats:
        moved = candidate.start_s + wire_s[chosen] / candidate.link_fraction
        return np.asarray(np.maximum(candidate.floor_s, moved), dtype=np.float64)

    found = fit_form(seconds, begin, measured, free=_FREE)
    return found.model_copy(update={"residuals": residuals_of(seconds(found, np.arange(len(mine))), measured)})
