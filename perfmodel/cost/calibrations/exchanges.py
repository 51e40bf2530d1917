"""What the exchanges of expert parallelism take where a switch joins the ranks: dispatch and combine, for all devices.

One file, `hardware_specs/calibrations/exchange.yaml`, written by `perfmodel calibrate --exchange`. No kernel table has
these messages; what is known are the figures that two publishers give.
"""

__all__ = ["ExchangeFits", "load_exchange_fits", "save_exchange_fits"]

import datetime
from functools import lru_cache
from pathlib import Path

import yaml

from perfmodel.cost.forms.messages.exchange import ExchangeFit
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml

_FILE = "exchange.yaml"


class ExchangeFits(Spec):
    """The fits of both directions, and where they come from."""

    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    dispatch: ExchangeFit
    combine: ExchangeFit


@lru_cache(maxsize=4)
def _loaded(file: Path) -> ExchangeFits:
    loaded = load_yaml(file)
    return parse(ExchangeFits, loaded.data, loaded.positions)


def load_exchange_fits() -> ExchangeFits:
    """The committed fits. Raises SpecError for a file that is missing or malformed."""
    return _loaded(data_dir("calibrations") / _FILE)


def save_exchange_fits(fits: ExchangeFits, path: Path, header: str) -> Path:
    """Write fits as YAML below `header`; reading them back gives equal ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(fits.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=100)
    path.write_text(header + text, encoding="utf-8")
    return path
