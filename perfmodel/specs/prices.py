"""The prices that a scenario's devices have: of which source, from when, and whether they have become old."""

__all__ = ["is_stale", "newest_price_date", "price_lines", "stale_price_notes"]

import datetime
import re
from collections.abc import Iterator
from functools import cache

from perfmodel.files.catalog import data_dir
from perfmodel.specs.hardware import HardwareSpec, Price
from perfmodel.specs.scenario import Scenario

_STALE = datetime.timedelta(days=366)
# The date in the block `price:` at the top level of a file: reading forty whole files takes longer than a simulation.
_DATE = re.compile(r"^price:(?:[^\n]*|(?:\n[ \t]+[^\n]*)+?)\bdate:\s*(\d{4}-\d{2}-\d{2})", re.MULTILINE)


@cache
def newest_price_date() -> datetime.date | None:
    """Date of the newest price in hardware_specs; None if there is none."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(data_dir("hardware").glob("*.yaml"))]
    found = [match[1] for text in texts if (match := _DATE.search(text))]
    return max(map(datetime.date.fromisoformat, found), default=None)


def is_stale(price: Price) -> bool:
    """Whether it is older by more than a year than the newest price in hardware_specs."""
    newest = newest_price_date()
    return newest is not None and newest - price.date > _STALE


def price_lines(scenario: Scenario) -> list[str]:
    """Which price each kind of device was billed at, from where and from when; nothing for those without one."""
    if scenario.price is not None:
        return [f"Price: {scenario.price.usd_per_gpu_hour:g} USD per device hour, given in the scenario."]
    return [
        f"Price: {price.usd_per_hour:g} USD per device hour of {device.name} ({_origin(price)})."
        for device, price in _priced(scenario)
    ]


def stale_price_notes(scenario: Scenario) -> list[str]:
    """A sentence for each price in use that is old."""
    if scenario.price is not None:
        return []
    return [
        f"The price of {device.name}, {price.usd_per_hour:g} USD per hour, dates from {price.date.isoformat()}, more "
        f"than a year before the newest in hardware_specs ({newest_price_date()}); give "
        f"`price: {{usd_per_gpu_hour: ...}}` a current one."
        for device, price in _priced(scenario)
        if is_stale(price)
    ]


def _priced(scenario: Scenario) -> Iterator[tuple[HardwareSpec, Price]]:
    """Each kind of device once, with its price."""
    devices = {device.name: device for device in (pool.hardware or scenario.hardware for pool in scenario.pools)}
    return ((device, device.price) for device in devices.values() if device.price is not None)


def _origin(price: Price) -> str:
    date = price.date.isoformat()
    return price.source if date in price.source else f"{price.source}, {date}"
