"""What an hour of a device costs: the list in hardware_specs/prices, and what a scenario gives in its place."""

__all__ = ["OWN", "Price", "PriceKind", "PriceOverride", "listed_price"]

import datetime
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, field_validator

from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file
from perfmodel.files.device_tables import named
from perfmodel.files.units import PositiveFloat
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml

OWN = "given in the scenario"  # the source of prices that are the user's
PriceKind = Literal["on_demand", "reserved", "spot", "owned"]


class Price(Spec):
    """What an hour of one device costs.

    source, date: who says so, and when; a price of one's own (`OWN`) has no date
    kind:        on_demand; reserved for a term; spot, which may be taken away; owned: what it cost over its hours
    is_unconfirmed: whether no list or quote at hand says so
    """

    source: str
    date: datetime.date | None = None
    usd_per_hour: PositiveFloat
    kind: PriceKind | None = None
    is_unconfirmed: bool = False

    @property
    def origin(self) -> str:
        """`on demand, unconfirmed, Google Cloud price list, 2024-06-01`"""
        kind = None if self.kind is None else self.kind.replace("_", " ")
        parts = (kind, "unconfirmed" if self.is_unconfirmed else None, self.source, self.date)
        return ", ".join(str(part) for part in parts if part is not None)


# Which of the two is asked by what is given, so that an error is about that one.
_Prices = Annotated[
    Annotated[PositiveFloat, Tag("all")] | Annotated[dict[str, PositiveFloat], Tag("each")],
    Discriminator(lambda given: "each" if isinstance(given, dict) else "all"),
]


class PriceOverride(Spec):
    """Prices in place of those of the list.

    usd_per_gpu_hour: of all devices alike, or of each by its name; a device without one keeps that of the list
    kind:             of these prices, for the answer to name
    """

    usd_per_gpu_hour: _Prices
    kind: PriceKind | None = None

    @field_validator("usd_per_gpu_hour")
    @classmethod
    def _by_own_names(cls, given: float | dict[str, float]) -> float | dict[str, float]:
        """h100 as h100-sxm-80gb; the name of a file elsewhere as it is."""
        if not isinstance(given, dict):
            return given
        return {device.name if (device := named(name)) else name: usd for name, usd in given.items()}

    def usd_of(self, device: str) -> float | None:
        """USD for an hour of the device of this name; None where the list's price holds."""
        given = self.usd_per_gpu_hour
        return given.get(device) if isinstance(given, dict) else given


class _PriceList(Spec):
    """prices: of devices by their names."""

    prices: dict[str, Price]


@cache
def _listed() -> dict[str, Price]:
    loaded = load_yaml(find_file("prices", "prices"))
    return parse(_PriceList, loaded.data, loaded.positions).prices


def listed_price(device: str) -> dict[str, Any]:
    """The price of the list, as a hardware file of one's own would have it; empty for a device that it lacks."""
    price = _listed().get(device)
    return {} if price is None else price.model_dump(exclude_defaults=True)
