"""Kernels that engines run and no table of a device has: taken from what is known of their like.

collective/dispatch, collective/combine   the exchange of expert parallelism, as published for one device
gemm/nvfp4_static, gemm/nvfp4             FP8 with scales known ahead, at the rate of FP4: NVFP4 checkpoints carry
                                          the scale of a tensor, and those of its blocks of 16 are found on the way.
                                          Where nothing before quantizes, one more kernel does; FP8 without known
                                          scales takes two (the largest value first), so that a kernel takes half of
                                          what these start later than FP8 with known scales; no less than any kernel.
"""

__all__ = ["with_unmeasured"]

from typing import Any

from perfmodel.cost.calibration import Calibration
from perfmodel.cost.forms.gemm import TiledGemmFit
from perfmodel.cost.forms.messages.exchange import COMBINE, DISPATCH
from perfmodel.cost.forms.messages.nccl import CollectiveFit

_ALL_TO_ALL = "all_to_all"


def with_unmeasured(calibration: Calibration) -> Calibration:
    """`calibration` with the kernels of this module that it lacks; one without any measured kernels stays."""
    found = _exchanges(calibration) | _nvfp4(calibration)
    missing = {key: fit for key, fit in found.items() if key not in calibration.families}
    return calibration.model_copy(update={"families": calibration.families | missing}) if missing else calibration


def _exchanges(calibration: Calibration) -> dict[str, Any]:
    if not calibration.knows("collective"):
        return {}
    fit = calibration.fit("collective", _ALL_TO_ALL)
    update = {"beyond": fit} if isinstance(fit, CollectiveFit) else {}
    return {
        "collective/dispatch": DISPATCH.model_copy(update=update),
        "collective/combine": COMBINE.model_copy(update=update),
    }


def _nvfp4(calibration: Calibration) -> dict[str, Any]:
    static, dynamic = (calibration.families.get(f"gemm/{name}") for name in ("fp8_static", "fp8"))
    if not isinstance(static, TiledGemmFit):
        return {}
    later_s = dynamic.launch_s - static.launch_s if isinstance(dynamic, TiledGemmFit) else 0.0
    quantizing = static.launch_s + max(later_s / 2, calibration.default.overhead_s)
    return {"gemm/nvfp4_static": static, "gemm/nvfp4": static.model_copy(update={"launch_s": quantizing})}
