"""What was not measured, taken from its nearest relatives: kernels of an engine, and a whole generation of devices.

collective/dispatch, collective/combine   the exchange of expert parallelism, as published for one device
gemm/nvfp4_static, gemm/nvfp4             FP8 with scales known ahead, at the rate of FP4: NVFP4 checkpoints carry
                                          the scale of a tensor, and those of its blocks of 16 are found on the way.
                                          Where nothing before quantizes, one more kernel does; FP8 without known
                                          scales takes two (the largest value first), so that a kernel takes half of
                                          what these start later than FP8 with known scales; no less than any kernel.

moe/nvfp4, moe/w4a8_mxfp4                 block-scaled 4-bit products: the kernels that an engine's description names
                                          in their place (`experts`, `stand_in`), at the rates of FP4 and FP8, with
                                          as many launches as the description counts.

attention_sparse                          prompts that attend to the latents which an indexer keeps (DSA): the kernel of
                                          FlashMLA reaches 640 TFLOP/s on an H800 SXM5 and 1450 on a B200, 65 % of
                                          the dense 16-bit peak of either (deepseek-ai/FlashMLA, README).

Achieved fractions of the declared peaks do not stay what they were: tensor rates double from one generation to the
next, and the software that feeds them follows years later. One file per architecture,
`hardware_specs/calibrations/generation@<architecture>.yaml`, fitted by `perfmodel calibrate` to whole serving runs on
its devices; kernel tables of a device itself, once there are some, take its place.
"""

import datetime
from typing import Any

from pydantic import Field

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.exchanges import load_exchange_fits
from perfmodel.cost.forms.experts import GroupedExpertsFit
from perfmodel.cost.forms.fits import Domain
from perfmodel.cost.forms.gemm import TiledGemmFit
from perfmodel.cost.forms.messages.nccl import CollectiveFit
from perfmodel.cost.forms.roofline import FamilyFit
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import load_fitted
from perfmodel.specs.engine.description import ExpertsRow

_ALL_TO_ALL = "all_to_all"
_SPARSE_SHARE = 0.65


def with_unmeasured(
    calibration: Calibration,
    generation: "GenerationFit | None" = None,
    row: ExpertsRow | None = None,
    library: Calibration | None = None,
) -> Calibration:
    """`calibration` with the kernels of this module that it lacks; one without any measured kernels stays.

    generation: what is known of the device's
    row:        how the engine runs experts of 4 bits, where other kernels stand for those; library: has them
    """
    found = _exchanges(calibration) | _nvfp4(calibration, generation) | _experts(row, library) | _sparse(calibration)
    missing = {key: fit for key, fit in found.items() if key not in calibration.families}
    return calibration.model_copy(update={"families": calibration.families | missing}) if missing else calibration


def _exchanges(calibration: Calibration) -> dict[str, Any]:
    if not calibration.knows("collective"):
        return {}
    fit = calibration.fit("collective", _ALL_TO_ALL)
    update = {"beyond": fit} if isinstance(fit, CollectiveFit) else {}
    fits = load_exchange_fits()
    return {
        "collective/dispatch": fits.dispatch.model_copy(update=update),
        "collective/combine": fits.combine.model_copy(update=update),
    }


def _sparse(calibration: Calibration) -> dict[str, Any]:
    if not calibration.knows("attention_prefill"):
        return {}
    return {"attention_sparse": FamilyFit(compute_fraction=_SPARSE_SHARE, overhead_s=calibration.default.overhead_s)}


def _nvfp4(calibration: Calibration, generation: "GenerationFit | None") -> dict[str, Any]:
    static, dynamic = (calibration.families.get(f"gemm/{name}") for name in ("fp8_static", "fp8"))
    if not isinstance(static, TiledGemmFit):
        return {}
    later_s = dynamic.launch_s - static.launch_s if isinstance(dynamic, TiledGemmFit) else 0.0
    if generation is not None:
        slower = {
            "memory_fraction": static.memory_fraction * generation.four_bit_memory,
            "launch_s": static.launch_s + generation.four_bit_launch_s,
        }
        static = static.model_copy(update=slower)
    quantizing = static.launch_s + max(later_s / 2, calibration.default.overhead_s)
    return {"gemm/nvfp4_static": static, "gemm/nvfp4": static.model_copy(update={"launch_s": quantizing})}


def _experts(row: ExpertsRow | None, library: Calibration | None) -> dict[str, Any]:
    if row is None or row.stand_in is None or library is None:
        return {}
    fit = library.families.get(row.stand_in.family)
    if not isinstance(fit, GroupedExpertsFit):
        return {}
    launch_s = fit.launch_s * row.num_kernels / row.stand_in.num_kernels
    found = fit.model_copy(update={"launch_s": launch_s, "domain": Domain()})
    return {f"moe/{_FAMILIES[form]}": found for form in row.formats if form in _FAMILIES}


_FAMILIES = {"nvfp4": "nvfp4", "mxfp4": "w4a8_mxfp4"}  # number formats as descriptions and as calibrations name them
_OF_COMPUTE = ("compute_fraction", "tensor_fraction")
_OF_MEMORY = ("memory_fraction",)


class GenerationFit(Spec):
    """What is left of the achieved fractions of the generation before.

    compute: of those of the tensor rate; memory: of those of the bandwidth
    four_bit_memory, four_bit_launch_s: of dense products of 4-bit operands: what they leave of the bandwidth of 8-bit
    ones, and seconds that they start later
    """

    architecture: str
    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    compute: float = Field(default=1.0, ge=0.2, le=1.5)
    memory: float = Field(default=1.0, ge=0.5, le=1.5)
    four_bit_memory: float = Field(default=1.0, ge=0.2, le=1.0)
    four_bit_launch_s: float = Field(default=0.0, ge=0.0, le=1e-5)

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
    return load_fitted(GenerationFit, file) if architecture is not None and file.is_file() else None
