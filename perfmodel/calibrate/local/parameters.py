"""The numbers of a backend as a vector: where each starts, how far it may be from there, and what it scales.

All are fitted as logarithms. A start is what is plausible before any figure is seen; `sd` is its standard deviation in
the fit's prior, by which backends, generations and versions with few figures stay near what they start from.
"""

__all__ = ["CPU_START", "GENERATION_SD", "GPU_START", "VERSION_SD", "ParameterLayout", "Start"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.calibrations.backends import BackendFit, Factors
from perfmodel.cost.forms.fits import Residuals

_CYCLES_SD = 0.6


class Start(NamedTuple):
    """value: before the logarithm; sd: of the logarithm, next to nothing for a number that stays"""

    value: float
    sd: float


_FIXED = 1e-4
GPU_START: dict[str, Start] = {
    "launch_s": Start(8e-6, 1.0),
    "unit_launch_s": Start(1e-12, _FIXED),
    "memory_fraction": Start(0.88, 0.1),
    "other_cycles": Start(0.1, 0.5),
    "row_share": Start(0.3, 0.7),
    "vector_knee": Start(3.0, 0.3),
    "compute_fraction": Start(0.4, 0.7),
    "float_compute_fraction": Start(0.5, 0.7),
    "tile": Start(4000.0, 1.2),
    "half_rows": Start(10.0, 0.7),
    "knee": Start(1.6, 0.3),
    "expert_memory": Start(0.8, 0.3),
    "expert_compute": Start(0.7, 0.5),
    "attention_fraction": Start(0.1, 1.0),
    "kv_fraction": Start(0.4, 0.5),
    "score_fraction": Start(0.05, 1.0),
    "score_kv_fraction": Start(0.3, 0.5),
    "core_w": Start(1.0, _FIXED),
    "power": Start(1e-6, _FIXED),
    "small_cores": Start(1.0, _FIXED),
}
CPU_START: dict[str, Start] = {
    **GPU_START,
    "unit_launch_s": Start(5e-7, 1.0),
    "memory_fraction": Start(0.8, 0.3),
    "other_cycles": Start(0.6, 0.5),
    "compute_fraction": Start(0.7, 0.7),
    "float_compute_fraction": Start(0.5, 0.7),
    "tile": Start(10.0, _FIXED),
    "kv_fraction": Start(0.5, 0.4),
    "score_kv_fraction": Start(0.5, 0.4),
    "core_w": Start(3.5, 0.4),
    "power": Start(0.7, 0.4),
    "small_cores": Start(1.5, 0.3),
}
GENERATION_SD = {"launch": 0.3, "memory": 0.05, "cycles": 0.3, "compute": 0.4}
# Small beside the sd of the numbers themselves: where the newest version has no prompts, those of the one before count.
VERSION_SD = {"launch": 0.4, "compute": 0.25, "float_compute": 0.25, "attention": 0.4}


@dataclass(frozen=True)
class ParameterLayout:
    """Which place of the vector is what.

    starts: of the backend's numbers; forms: formats of weights with cycles of their own
    generations, versions: that have factors
    """

    starts: Mapping[str, Start]
    forms: Sequence[str]
    generations: Sequence[str]
    versions: Sequence[str]
    cycles: Mapping[str, float]

    @property
    def prior(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Centre and standard deviations of the vector."""
        centre = [start.value for start in self.starts.values()]
        sd = [start.sd for start in self.starts.values()]
        centre += [self.cycles.get(form, self.starts["other_cycles"].value) for form in self.forms]
        sd += [_CYCLES_SD] * len(self.forms)
        factors = [
            *(list(GENERATION_SD.values()) * len(self.generations)),
            *(list(VERSION_SD.values()) * len(self.versions)),
        ]
        return np.concatenate([np.log(centre), np.zeros(len(factors))]), np.array(sd + factors)

    def read(self, vector: NDArray[Any]) -> tuple[dict[str, float], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The numbers by name, cycles by form, factors by generation, and by version; none as logarithms."""
        values = np.exp(vector)
        first, second = len(self.starts), len(self.starts) + len(self.forms)
        third = second + len(GENERATION_SD) * len(self.generations)
        numbers = dict(zip(self.starts, values[:first].tolist(), strict=True))
        numbers.update({name: max(1.0, numbers[name]) for name in ("knee", "vector_knee")})  # a sum at most
        by_generation = values[second:third].reshape(-1, len(GENERATION_SD))
        by_version = values[third:].reshape(-1, len(VERSION_SD))
        return numbers, values[first:second], by_generation, by_version

    def fit(self, vector: NDArray[Any], decode: Residuals, prompt: Residuals) -> BackendFit:
        """The vector as a file has it.

        vector: of the fit; decode, prompt: what figures of devices that were left out leave unexplained
        """
        numbers, cycles, generations, versions = self.read(vector)
        if numbers["power"] < 1e-3:
            numbers.update(power=0.0, core_w=1.0)
        if numbers["unit_launch_s"] < 1e-10:
            numbers["unit_launch_s"] = 0.0
        return BackendFit(
            **{name: _rounded(value) for name, value in numbers.items()},
            cycles={form: _rounded(value) for form, value in zip(self.forms, cycles.tolist(), strict=True)},
            by_generation=_factors(self.generations, GENERATION_SD, generations),
            by_version=_factors(self.versions, VERSION_SD, versions),
            decode_residuals=decode,
            prompt_residuals=prompt,
        )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _factors(names: Sequence[str], fields: Mapping[str, float], values: NDArray[Any]) -> dict[str, Factors]:
    return {
        name: Factors(**{field: _rounded(value) for field, value in zip(fields, row, strict=True)})
        for name, row in zip(names, values.tolist(), strict=True)
    }
