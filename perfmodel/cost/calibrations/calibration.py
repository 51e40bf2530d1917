"""Calibrations: achieved fractions of a device per operator family under an engine, and their residuals.

`families` holds one fit of a kernel model (`perfmodel.cost.kernel_models`) per operator family and number format.
`DATASHEET` is the plain roofline: fractions of 1, and a launch overhead (launch, ramp-up, drain) by kind of device.
Fitted ones are in `hardware_specs/calibrations/<device>@<engine>.yaml`; `perfmodel calibrate` writes them.

Real kernels reach 0.75-0.9 of the bandwidth and 0.5-0.9 of the tensor rate, so the datasheet is optimistic for large
work."""

import datetime
from typing import Literal

from pydantic import Field

from perfmodel.cost.kernel_models.attention.decode import FlashDecodeFit
from perfmodel.cost.kernel_models.device import FALLBACKS
from perfmodel.cost.kernel_models.fits import Residuals, distance
from perfmodel.cost.kernel_models.registry import KernelFit
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.files.base import Spec
from perfmodel.files.units import FittedSeconds, NonNegativeFloat, NonNegativeInt
from perfmodel.ops.formats import MMA_SYNC_RATE, SPARSE_RATE, STATIC_SCALES
from perfmodel.ops.problem_sizes import KernelTraits
from perfmodel.specs.hardware import HardwareSpec

# Multiplied by the tensor units that multiply 16 bits: where they were not measured, they reach the same share of
# their own peak.
_SAME_UNITS = {"tf32": ("bf16", "fp16"), "fp16_acc16": ("fp16", "bf16")}


class HostFit(Spec):
    """Host (CPU) time per step: scheduling, input preparation, sampling bookkeeping.

    `serial` parts are always exposed; `hidden` ones overlap with the device; without asynchronous scheduling none:

        t_step = serial + max(hidden, device)        t_step = serial + hidden + device, scheduled synchronously

    `prompt` parts apply to steps with prompts beyond the captured CUDA graphs: extra preparation (`prompt_step_s`), and
    kernel-by-kernel launches (`hidden_prompt`), which queue up and are exposed only if the device catches up, however
    steps are scheduled. Graphs cover steps with prompts up to `captured_tokens` tokens (a fact of the engine's code),
    and all steps without prompts."""

    serial_step_s: FittedSeconds = 0.0
    serial_per_sequence_s: FittedSeconds = 0.0
    hidden_step_s: FittedSeconds = 0.0
    hidden_per_sequence_s: FittedSeconds = 0.0
    replays_graphs: bool = False  # measured with CUDA graphs: without them the launches come on top
    captured_tokens: NonNegativeInt = 0
    prompt_step_s: FittedSeconds = 0.0
    hidden_prompt_step_s: FittedSeconds = 0.0
    hidden_prompt_layer_s: FittedSeconds = 0.0
    hidden_prompt_moe_layer_s: FittedSeconds = 0.0  # beside `hidden_prompt_layer_s`, of layers with experts
    hidden_prompt_latent_layer_s: FittedSeconds = 0.0  # the same, of layers with latent attention
    mask_s: FittedSeconds = 0.0  # hidden, for each token that is sampled for an answer of a required shape
    mask_share: float = 0.0  # of sampled tokens, those that are, where a step does not say how many

    def times(self, factor: float) -> "HostFit":
        """All times multiplied by `factor`."""
        return self.model_copy(
            update={name: factor * getattr(self, name) for name in type(self).model_fields if name.endswith("_s")}
        )

    def serial_s(self, num_sequences: int) -> float:
        """Exposed seconds of a step."""
        return self.serial_step_s + self.serial_per_sequence_s * num_sequences

    def launches_s(self, num_layers: int, num_moe_layers: int, num_latent_layers: int) -> float:
        """Seconds to launch a step with prompts, beside the device."""
        seconds = self.hidden_prompt_step_s + self.hidden_prompt_layer_s * num_layers
        seconds += self.hidden_prompt_moe_layer_s * num_moe_layers
        return seconds + self.hidden_prompt_latent_layer_s * num_latent_layers

    def hidden_s(self, num_sequences: int) -> float:
        """Seconds of a step that overlap with the device."""
        return self.hidden_step_s + self.hidden_per_sequence_s * num_sequences


# Parts of a key before the kernel's name: number formats, and of attention the head size.
_NUM_FORMATS = {
    "gemm": 1,
    "moe": 1,
    "attention_decode": 3,
    "attention_prefill": 3,
    "latent_decode": 3,
    "latent_prefill": 3,
    "encoder_attention": 3,
}


def formats_of(key: str) -> str:
    """The key of a kernel's family and formats, without the kernel's name."""
    family, *rest = key.split("/")
    return "/".join((family, *rest[: _NUM_FORMATS.get(family, len(rest))]))


class Calibration(Spec):
    """All fits for one device and engine.

    `families` keys are a family ("gemm"), a family and a rate or kind of message ("gemm/fp8", "collective/all_reduce"),
    or that and a kernel for some sizes only ("attention_decode/bf16/kv_fp8/hd128/xqa"), as its fit's `domain` states.
    """

    device: str
    devices: tuple[str, ...] = ()  # others of its architecture that were measured: the fits are of all together
    engine: str
    origin: Literal["datasheet", "calibrated"] = "calibrated"
    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    families: dict[str, KernelFit] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)  # key -> the engine's versions that were measured, "a,b"
    # The same of kernels that engines do not run by default, and of older versions (`<key>/<versions>`): in a file of
    # their own.
    others: dict[str, KernelFit] = Field(default_factory=dict, exclude=True)
    default: FamilyFit = FamilyFit()
    contained: tuple[str, ...] = ()  # operators whose time lies within that of measured attention kernels
    host: HostFit = HostFit()
    step_residuals: Residuals = Residuals()  # of whole steps that decode
    prompt_residuals: Residuals = Residuals()  # of whole steps of prompts
    kernel_factor: NonNegativeFloat = (
        1.0  # how many times as long as its fit says every kernel takes on one's own server
    )
    # What a scenario's `overheads` make of the kernels' and of the host's; no file says it.
    kernel_overheads: NonNegativeFloat = 1.0
    host_overheads: NonNegativeFloat = 1.0
    spread: float = Field(default=1.0, ge=1)  # how much wider than its residuals say: the fits come from elsewhere
    is_passed_on: bool = Field(default=False, exclude=True)  # from a related device or engine; no file says it

    def has_family(self, family: str) -> bool:
        """Whether any kernel of `family` was measured."""
        return any(key.split("/")[0] == family for key in self.families)

    @property
    def has_ragged_cost(self) -> bool:
        """Whether an attention kernel is slower for unequal contexts."""
        return self.has_family("attention_mixed") or any(
            isinstance(fit, FlashDecodeFit) and (fit.kernel.split_share is not None or not fit.kernel.is_balanced)
            for fit in self.families.values()
        )

    def fit(self, family: str, rate: str, traits: KernelTraits | None = None, format: str = "") -> KernelFit:
        """The most specific fit: family and number `format`, family and `rate`, family, a fallback of `rate`, default.

        Sparse tensor cores reach the dense ones' share of their peak. Among fits of one family and rate, the domain
        nearest to the work's `traits` wins."""
        if family == "latent_prefill":  # its keys name the format of the projections of modules first
            latents = self._nearest(f"{family}/bfloat16", traits)
            if latents is not None:
                return latents
        if family == "latent_prefill" or (family == "encoder_attention" and not self.has_family(family)):
            family = "attention_prefill"
        rate = rate.removesuffix(SPARSE_RATE).removesuffix(MMA_SYNC_RATE)
        rates = (*((format, format.removesuffix(STATIC_SCALES)) if format else ()), rate)
        names = (*(f"{family}/{item}" for item in rates), family)
        for name in (
            *names,
            *(f"{family}/{other}" for other in (*_SAME_UNITS.get(rate, ()), *FALLBACKS.get(rate, ()))),
        ):
            nearest = self._nearest(name, traits)
            if nearest is not None:
                return nearest
        return self.default

    def _nearest(self, name: str, traits: KernelTraits | None) -> KernelFit | None:
        nearest = [self.families[name]] if name in self.families else []
        if "/" in name:
            nearest += [fit for key, fit in self.families.items() if key.startswith(f"{name}/")]
        return min(nearest, key=lambda fit: distance(fit, traits), default=None)


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
    """The datasheet calibration: fractions of 1, a launch overhead by kind of device."""
    overhead = LAUNCH_OVERHEAD_S[hardware.kind]
    return DATASHEET.model_copy(
        update={
            "device": hardware.name,
            "source": f"declared peaks; {overhead * 1e6:g} us per kernel on a {hardware.kind}",
            "default": FamilyFit(overhead_s=overhead),
        }
    )
