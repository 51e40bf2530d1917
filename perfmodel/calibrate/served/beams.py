"""What beam search reads of its KV cache: the beams of a request have their prompt's blocks in common.

The kernel reads a request's prompt once for each beam, and the beams' thread blocks run side by side: the first read
comes from HBM, the others find it in L2. With b beams, p tokens of prompt, and a tokens behind it in each beam, a step
takes as long as one that reads from HBM

    p (1 + (b - 1) / s) + b a    tokens of a request,

s the speed of reads from L2 over those from HBM. Kernel tables have it where a benchmark repeats on KV that stays in L2
(`FlashDecodeFit.cache_speedup`); kernels without such rows have the median of those with.
"""

__all__ = ["cached_read_speedup", "tokens_read"]

from functools import lru_cache

import numpy as np

from perfmodel.cost import Calibration, OperatorTimer, load_calibration
from perfmodel.cost.calibrations.files import calibrated_kernels
from perfmodel.cost.forms.attention.decode import FlashDecodeFit
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware


def tokens_read(prompt: float, behind: float, beams: int, speedup: float) -> float:
    """KV tokens that a beam's attention reads in a step, as if all came from HBM; mean over the beams of a request.

    prompt, behind: tokens of the prompt, and of each beam's own answer; speedup: of reads from L2 over HBM
    """
    return prompt * (1 + (beams - 1) / speedup) / beams + behind


def cached_read_speedup(work: Work, hardware: HardwareSpec, calibration: Calibration) -> float:
    """How much faster than from HBM the kernel of `work`, a decode's attention, reads KV that is in L2."""
    fit = OperatorTimer(hardware, calibration).fit(work)
    is_known = isinstance(fit, FlashDecodeFit) and "cache_speedup" in fit.model_fields_set
    return fit.cache_speedup if isinstance(fit, FlashDecodeFit) and is_known else _usual_speedup()


@lru_cache(maxsize=1)
def _usual_speedup() -> float:
    """The median of all measured kernels that read faster from L2; 1 without any."""
    found = []
    for device, engine, _ in calibrated_kernels():
        fits = load_calibration(load_hardware(device), engine).families.values()
        found += [fit.cache_speedup for fit in fits if isinstance(fit, FlashDecodeFit) and fit.cache_speedup > 1.05]
    return float(np.median(found)) if found else 1.0
