"""All forms: what a calibration's `families` may hold, and how each is timed. To add one, write its file and its row.

A form is a fit (a spec with a `form`, parameters and `residuals`) and a function (work, fit, device) -> `OperatorTime`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, Self

from pydantic import ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from perfmodel.cost.kernel_models import blocks, experts, gemm, module, roofline
from perfmodel.cost.kernel_models.attention import decode, latent, mixed, prefill
from perfmodel.cost.kernel_models.device import NO_TIME, DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.messages import collective
from perfmodel.files.base import Spec
from perfmodel.files.validation import unknown_key
from perfmodel.ops.work import Work


class KernelModel(NamedTuple):
    """The spec of a form's fits, and its timing function."""

    fit: type[Spec]
    time: Callable[[Work, Any, DeviceFacts], OperatorTime]


# By the name that stands as `form` in a file; a fit without one is a roofline.
KERNEL_MODELS: dict[str, KernelModel] = {
    "roofline": KernelModel(roofline.FamilyFit, roofline.roofline_time),
    "flash_decode": KernelModel(decode.FlashDecodeFit, decode.decode_time),
    "flash_prefill": KernelModel(prefill.FlashPrefillFit, prefill.prefill_time),
    "mixed_attention": KernelModel(mixed.MixedAttentionFit, mixed.mixed_time),
    # Of the modules the attention inside.
    "latent_decode": KernelModel(
        latent.LatentDecodeFit, lambda work, fit, device: decode.decode_time(work, fit.attention, device)
    ),
    "latent_prefill": KernelModel(
        latent.LatentPrefillFit, lambda work, fit, device: prefill.prefill_time(work, fit.attention, device)
    ),
    "collective": KernelModel(collective.CollectiveFit, collective.collective_time),
    "custom_all_reduce": KernelModel(collective.CustomAllReduceFit, collective.custom_time),
    "expert_exchange": KernelModel(collective.ExchangeFit, collective.exchange_time),
    "tiled_gemm": KernelModel(gemm.TiledGemmFit, gemm.time_gemm),
    "grouped_experts": KernelModel(experts.GroupedExpertsFit, experts.time_experts),
    "module": KernelModel(module.ModuleFit, module.module_time),
    "block_matmul": KernelModel(blocks.BlockMatmulFit, blocks.block_matmul_time),
    "block_stream": KernelModel(blocks.BlockStreamFit, blocks.block_stream_time),
    "on_host": KernelModel(blocks.OnHostFit, blocks.on_host_time),
}


@dataclass(frozen=True, slots=True)
class _ByKernelModel:
    """A field that holds a fit of any form in `KERNEL_MODELS`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validated)

    def _validated(self, value: Any) -> Any:
        if isinstance(value, tuple(form.fit for form in KERNEL_MODELS.values())):
            return value
        name = str(value.get("form", "roofline")) if isinstance(value, dict) else "roofline"
        if name not in KERNEL_MODELS:
            raise ValueError(f"got form {name!r}; expected {', '.join(KERNEL_MODELS)}")
        fit = KERNEL_MODELS[name].fit
        unknown = [key for key in value if key not in fit.model_fields] if isinstance(value, dict) else []
        if unknown:
            raise ValidationError.from_exception_data(name, [_unknown(str(key), value[key], fit) for key in unknown])
        return fit.model_validate(value)


def _unknown(key: str, value: Any, fit: type[Spec]) -> InitErrorDetails:
    """The error for an unknown key, raised here, where the form's keys are known."""
    error = PydanticCustomError("value_error", "{error}", {"error": unknown_key(key, fit)})
    return InitErrorDetails(type=error, loc=(key,), input=value)


if TYPE_CHECKING:

    class KernelFit(Protocol):
        """A fit of any form."""

        @property
        def form(self) -> str: ...
        @property
        def residuals(self) -> Residuals: ...
        def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...
        def model_dump(self, *, exclude: set[str] | None = None) -> dict[str, Any]: ...

else:
    KernelFit = Annotated[Any, _ByKernelModel()]


def time_work(work: Work, fit: KernelFit, device: DeviceFacts) -> OperatorTime:
    """The time of one run of `work` under `fit`; none for a work without kernels."""
    if not work.num_kernels:
        return NO_TIME
    return KERNEL_MODELS[fit.form].time(work, fit, device)
