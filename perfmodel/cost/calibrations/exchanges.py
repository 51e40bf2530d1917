"""What the exchanges of expert parallelism take where a switch joins the ranks: dispatch and combine, for all devices.

One file, `hardware_specs/calibrations/exchange.yaml`, written by `perfmodel calibrate --exchange`. No kernel table has
these messages; what is known are the figures that two publishers give.
"""

import datetime

from perfmodel.cost.forms.messages.exchange import ExchangeFit
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import load_fitted

_FILE = "exchange.yaml"


class ExchangeFits(Spec):
    """The fits of both directions, and where they come from."""

    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    dispatch: ExchangeFit
    combine: ExchangeFit


def load_exchange_fits() -> ExchangeFits:
    """The committed fits. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(ExchangeFits, data_dir("calibrations") / _FILE)
