"""Provenance of a result: versions, the engine's description, calibrations.

Calibrations are named with a hash of their content, transferred ones included: equal hashes are equal step times."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.cost.calibrations.backends import BackendFits, engine_calibration
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.engine_profile import EngineProfile, profile_of
from perfmodel.files.base import Spec
from perfmodel.renderable import to_jsonable
from perfmodel.specs import list_hardware, load_hardware
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.version import RELEASE

_DIGITS = 16  # of a hash: enough to distinguish files
Fit = Calibration | EngineProfile | BackendFits


@dataclass(frozen=True, order=True)
class FittedSource:
    """A calibration or an engine's profile that predictions came from.

    key: device@engine or engine@name; digest: a hash of all that it says"""

    name: str
    source: str
    date: str = ""
    key: str = ""
    digest: str = ""

    @classmethod
    def of(cls, fitted: Fit) -> "FittedSource":
        date = fitted.date.isoformat() if fitted.date else ""
        source, name = fitted.source, ""
        if isinstance(fitted, EngineProfile):
            key, source = f"engine@{fitted.name or fitted.engine}", source or "not fitted: adds nothing"
        elif isinstance(fitted, BackendFits):
            key = f"backend@{fitted.engine}"
        else:
            key = f"{fitted.device}@{fitted.engine}"
            if fitted.origin == "datasheet" or fitted.is_passed_on:
                name = f"{fitted.device}, no file of its own"
        return cls(name or key, source, date, key, _digest(fitted))

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "source": self.source, "date": self.date}


@dataclass(frozen=True, order=True)
class EngineSource:
    """An engine as it was described: the version that stands for the one asked for; note: where they differ"""

    name: str
    version: str
    digest: str
    note: str = ""

    @classmethod
    def of(cls, engine: EngineSpec) -> "EngineSource":
        described = engine.described
        version = described.version
        return cls(described.description.name, version.described, _digest(described.facts), version.note)


@dataclass(frozen=True)
class Provenance:
    """What predictions of some scenarios rest on, each once, sorted by name."""

    fitted: tuple[FittedSource, ...] = ()
    engines: tuple[EngineSource, ...] = ()

    def to_json(self, kind: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Versions, hashes and resolved `inputs`; kind: of result, e.g. run or plan"""
        return {
            "kind": kind,
            "perfmodel": RELEASE,
            "engines": [vars(engine) for engine in self.engines],
            "calibrations": {item.key: item.digest for item in self.fitted},
            "inputs": dict(inputs),
        }


def provenance_of(
    scenarios: Iterable[Scenario], calibration: Calibration | None = None, profile: EngineProfile | None = None
) -> Provenance:
    """Provenance of simulations of `scenarios`, all pools.

    calibration: for all devices, instead of their own; profile: for all engines"""
    pools = [(pool.hardware or scenario.hardware, pool.engine) for scenario in scenarios for pool in scenario.pools]
    asked = {
        (hardware.name, engine.profile, engine.version, engine.calibration): (hardware, engine)
        for hardware, engine in pools
    }
    fits: list[Fit] = []
    for hardware, engine in asked.values():
        # A scenario's overrides of a device do not change its files.
        in_its_file = load_hardware(hardware.name) if hardware.name in list_hardware() else hardware
        fits.append(calibration or engine_calibration(in_its_file, engine))
        fits.append(profile or profile_of(engine))
    engines = {EngineSource.of(engine) for _, engine in asked.values()}
    return Provenance(tuple(sorted({FittedSource.of(fit) for fit in fits})), tuple(sorted(engines)))


def resolved(spec: Spec) -> Any:
    """All fields of a spec, defaults included, as plain data; sets sorted, so that equal specs give equal text."""
    return to_jsonable(spec.model_dump())


def _digest(spec: Spec) -> str:
    return hashlib.sha256(json.dumps(resolved(spec), sort_keys=True).encode()).hexdigest()[:_DIGITS]
