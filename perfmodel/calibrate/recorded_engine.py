"""The engine of a recorded run: what the record says of it, and what its version puts where the record says nothing."""

__all__ = ["recorded_engine"]

from collections.abc import Mapping
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.specs import EngineSpec, HardwareSpec
from perfmodel.specs.engine.defaults import with_defaults
from perfmodel.specs.engine.versions import parse_version

# Records without a version, or with the name of a build alone, are of the first half of 2026: what was current then.
_CURRENT = {"vllm": "0.19.0", "sglang": "0.5.9", "trtllm": "1.2.0"}


def recorded_engine(profile: str, version: str, hardware: HardwareSpec, arguments: Mapping[str, Any]) -> EngineSpec:
    """The engine as it ran.

    profile:   its name in hardware_specs/engines
    version:   as the record states it, or ""; one older or newer than any described has the facts of the nearest, and
               wider intervals (`perfmodel.cost.scenario_fits`)
    hardware:  the devices that it ran on
    arguments: those of `EngineSpec` that the record gives
    """
    try:
        is_numbered = bool(parse_version(version)[0])
    except SpecError:
        is_numbered = False
    stated = version if is_numbered else _CURRENT.get(profile)
    return with_defaults(EngineSpec(**{**arguments, "profile": profile, "version": stated}), hardware)
