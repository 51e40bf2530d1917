"""What the predictions of scenarios come from: calibrations of devices, profiles of engines, fits of generations."""

__all__ = ["basis_of"]

from collections.abc import Iterable

from perfmodel.cost import load_calibration, load_engine_profile
from perfmodel.cost.generations import load_generation
from perfmodel.specs import Scenario
from perfmodel.validate.report import Basis


def basis_of(scenarios: Iterable[Scenario]) -> list[Basis]:
    """Each calibration and profile once, sorted by name."""
    devices = {(each.hardware.name, each.engine.profile): each.hardware for each in scenarios}
    found = {Basis.of(load_calibration(hardware, profile)) for (_, profile), hardware in devices.items()}
    found |= {Basis.of(load_engine_profile(profile)) for _, profile in devices}
    generations = (load_generation(hardware.declared.architecture) for hardware in devices.values())
    found |= {Basis.of(generation) for generation in generations if generation is not None}
    return sorted(found)
