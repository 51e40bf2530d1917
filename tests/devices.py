"""Devices that tests go through: those with files of their own, and one of each other generation of accelerators."""

__all__ = ["ONE_OF_EACH"]

from perfmodel.files.device_tables import device_names
from perfmodel.specs import list_names, load_hardware


def _one_of_each() -> list[str]:
    own = list_names("hardware")
    seen = {load_hardware(name).declared.architecture for name in own}
    others = []
    for name in device_names():
        device = load_hardware(name)
        if device.declared.architecture not in seen and (device.kind != "cpu" or not others):
            seen.add(device.declared.architecture)
            others.append(name)
    return own + others


ONE_OF_EACH = _one_of_each()
