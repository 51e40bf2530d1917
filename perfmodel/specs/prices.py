"""The prices that a scenario's devices have: of which source, from when, and whether they have become old."""

__all__ = ["is_stale", "price_lines", "stale_price_notes"]

import datetime
from collections.abc import Iterator

from perfmodel.specs.hardware import HardwareSpec, Price
from perfmodel.specs.scenario import Scenario

_STALE = datetime.timedelta(days=183)


def is_stale(price: Price) -> bool:
    """Whether it is older than half a year today."""
    return datetime.datetime.now(datetime.UTC).date() - price.date > _STALE


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
        f"than half a year ago; give `price: {{usd_per_gpu_hour: ...}}` a current one."
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
