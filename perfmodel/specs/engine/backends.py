"""The code that an engine runs its kernels with, where it has several: CUDA, ROCm, Vulkan, Metal, SYCL, a CPU's own."""

__all__ = ["Backend", "BackendFacts", "backend_of"]

from collections.abc import Mapping
from typing import Literal

from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.specs.hardware import HardwareSpec

Backend = Literal["cuda", "rocm", "vulkan", "metal", "mlx", "sycl", "opencl", "cpu"]


class BackendFacts(Spec):
    """One backend of an engine.

    kind, makers: of the devices that it is for; any maker unless given
    default:      it is what these devices are run with unless a scenario says otherwise
    rate:         the peak that weights in block formats are multiplied at, a key of `peak_flops_per_s`
    float_rate:   the same of weights in 16 bits
    """

    kind: Literal["gpu", "cpu"] = "gpu"
    makers: tuple[str, ...] = ()
    default: bool = True
    rate: str
    float_rate: str

    def takes(self, hardware: HardwareSpec) -> bool:
        """Whether it runs on `hardware`; a device whose maker no file says may be anybody's."""
        return self.kind == hardware.kind and (
            not self.makers or hardware.maker is None or hardware.maker in self.makers
        )


def backend_of(asked: Backend | None, backends: Mapping[Backend, BackendFacts], hardware: HardwareSpec) -> Backend:
    """The backend that `hardware` is run with: the one `asked` for, or the first default one that takes the device.

    Raises SpecError, with those that there are, for one that the engine has not, or has not for the device.
    """
    fitting = [name for name, facts in backends.items() if facts.takes(hardware)]
    if asked is not None and asked not in fitting:
        allowed = f"allowed there: {', '.join(fitting)}" if fitting else "which the engine has no backend for"
        raise SpecError(f"engine.backend: found {asked} on {hardware.name} (a {hardware.kind}), {allowed}.")
    if not fitting:
        raise SpecError(f"engine.profile: the engine has no backend for {hardware.name} (a {hardware.kind}).")
    if asked is not None:
        return asked
    return next((name for name in fitting if backends[name].default), fitting[0])
