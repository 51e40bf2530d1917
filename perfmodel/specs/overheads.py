"""`Overheads`: what if launches or the host took less time? Multiples of what the calibration says."""

__all__ = ["Overheads"]

from pydantic import NonNegativeFloat

from perfmodel.specs.base import Spec


class Overheads(Spec):
    """Multiples of overheads, which no datasheet declares; 1 leaves them as they are, 0.5 halves them.

    kernels: what a kernel costs beside its bytes and FLOPs: launch, ramp-up, drain
    host:    the engine's own time per step, launches without CUDA graphs, and the front end's (HTTP, tokenisation)
    """

    kernels: NonNegativeFloat = 1.0
    host: NonNegativeFloat = 1.0
