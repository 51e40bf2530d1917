"""The calibration of a device that nobody measured: the datasheet's peaks, and assumed launch overheads.

What it knows: nothing but the declared figures. What it assumes: what a kernel costs beside its bytes and FLOPs
(launch, ramp-up, drain), by kind of device. Real kernels reach 0.75-0.9 of the bandwidth and 0.5-0.9 of the tensor
rate, so this model is optimistic for large work; `perfmodel calibrate` replaces it.
"""

__all__ = ["DATASHEET", "EAGER_LAUNCH_S", "EAGER_OPERATOR_S", "LAUNCH_OVERHEAD_S", "datasheet"]

from perfmodel.cost.calibrations.calibration import Calibration, FamilyFit
from perfmodel.specs.hardware import HardwareSpec

# Seconds per kernel. gpu: elementwise kernels cost their bytes plus 3-5 us (LLMCompass, ISCA 2024, softmax, LayerNorm
# and GELU curves); replayed from a CUDA graph the launch itself is ~1 us and the rest is ramp-up and drain. tpu, npu:
# XLA fuses the step into one program without launches, some 1 us of pipeline fill per operator [assumed]. cpu: an
# OpenMP fork and join plus framework dispatch [assumed]. fpga: dataflow, stages chained in hardware [assumed].
LAUNCH_OVERHEAD_S = {"gpu": 5e-6, "cpu": 5e-6, "tpu": 1e-6, "npu": 2e-6, "fpga": 0.5e-6}

# Host seconds per kernel launched from Python without CUDA graphs: 4-10 us on servers of 2023-24, where gpt-fast in
# eager mode (~800 kernels per token of a 7B model) took 39 ms, which includes more than launches.
EAGER_LAUNCH_S = 8e-6

# Host seconds per kernel of plain PyTorch modules, views and module calls between kernels included: 5 us through Python
# and the dispatcher (pytorch/pytorch issue 41383: 5 us for the simplest operation without gradients, 2020), and 5 us
# for the launch itself (LAUNCH_OVERHEAD_S). For the first part a decoder layer of a few elements takes 3.6 to 4.4 us a
# kernel on a CPU (PyTorch 2.13, one core of a shared server of 2026, the least of 60 runs, the small kernels included).
EAGER_OPERATOR_S = 5e-6 + LAUNCH_OVERHEAD_S["gpu"]

DATASHEET = Calibration(
    device="any",
    engine="datasheet",
    origin="datasheet",
    source="declared peaks; 5 us per kernel (LLMCompass, ISCA 2024: 3-5 us)",
    default=FamilyFit(overhead_s=LAUNCH_OVERHEAD_S["gpu"]),
)


def datasheet(hardware: HardwareSpec) -> Calibration:
    """The datasheet calibration of a device: fractions of 1, a launch overhead by its kind."""
    overhead = LAUNCH_OVERHEAD_S[hardware.kind]
    return DATASHEET.model_copy(
        update={
            "device": hardware.name,
            "source": f"declared peaks; {overhead * 1e6:g} us per kernel on a {hardware.kind}",
            "default": FamilyFit(overhead_s=overhead),
        }
    )
