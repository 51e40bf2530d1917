"""`GenerationFit`: how kernels written for one generation of devices do on the next, of which nobody measured kernels.

Achieved fractions of the declared peaks do not stay what they were: tensor rates double from one generation to the
next, and the software that feeds them follows years later. One file per architecture,
`hardware_specs/calibrations/generation@<architecture>.yaml`, fitted by `perfmodel calibrate` to whole serving runs on
its devices; kernel tables of a device itself, once there are some, take its place.
"""

__all__ = ["GenerationFit", "load_generation", "save_generation"]

import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml

_OF_COMPUTE = ("compute_fraction", "tensor_fraction")
_OF_MEMORY = ("memory_fraction",)


class GenerationFit(Spec):
    """What is left of the achieved fractions of the generation before.

    compute: of those of the tensor rate; memory: of those of the bandwidth
    """

    architecture: str
    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    compute: float = Field(default=1.0, ge=0.2, le=1.5)
    memory: float = Field(default=1.0, ge=0.5, le=1.5)

    def applied_to(self, calibration: Calibration) -> Calibration:
        """The calibration of a device of the generation before, for one of this."""
        families = {key: self._of(fit) for key, fit in calibration.families.items()}
        return calibration.model_copy(update={"families": families, "default": self._of(calibration.default)})

    def _of(self, fit: Any) -> Any:
        update = {}
        for names, factor in ((_OF_COMPUTE, self.compute), (_OF_MEMORY, self.memory)):
            for name in names:
                value = getattr(fit, name, None)
                if value is not None:
                    update[name] = min(1.0, value * factor)
        return fit.model_copy(update=update)


def load_generation(architecture: str | None) -> GenerationFit | None:
    """What is known of an architecture's step from the one before; None if nothing is."""
    file = data_dir("calibrations") / f"generation@{architecture}.yaml"
    if architecture is None or not file.is_file():
        return None
    loaded = load_yaml(file)
    return parse(GenerationFit, loaded.data, loaded.positions)


def save_generation(fit: GenerationFit, path: Path, header: str) -> Path:
    """Write a fit as YAML; reading it back gives an equal one."""
    data = {"architecture": fit.architecture} | fit.model_dump(mode="json", exclude_defaults=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + yaml.safe_dump(data, sort_keys=False, width=100), encoding="utf-8")
    return path
