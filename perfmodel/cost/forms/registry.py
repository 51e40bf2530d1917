"""All forms: what a calibration's `families` may hold, and how each is timed. To add one, write its file and its row.

A form is a fit (a spec with a `form`, parameters and `residuals`) and a function (work, fit, device) -> `OperatorTime`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, Self

from pydantic import ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from perfmodel.cost.forms.attention.decode import FlashDecodeFit, decode_time
from perfmodel.cost.forms.attention.latent import (
    LatentDecodeFit,
    LatentPrefillFit,
    latent_decode_time,
    latent_prefill_time,
)
from perfmodel.cost.forms.attention.mixed import MixedAttentionFit, mixed_time
from perfmodel.cost.forms.attention.prefill import FlashPrefillFit, prefill_time
from perfmodel.cost.forms.blocks.matmul import BlockMatmulFit, block_matmul_time
from perfmodel.cost.forms.blocks.on_host import OnHostFit, on_host_time
from perfmodel.cost.forms.blocks.stream import BlockStreamFit, block_stream_time
from perfmodel.cost.forms.device import DeviceFacts, OperatorTime
from perfmodel.cost.forms.experts import GroupedExpertsFit, time_experts
from perfmodel.cost.forms.fits import Residuals
from perfmodel.cost.forms.gemm import TiledGemmFit, time_gemm
from perfmodel.cost.forms.messages.collective import CustomAllReduceFit, collective_time, custom_time
from perfmodel.cost.forms.messages.exchange import ExchangeFit, exchange_time
from perfmodel.cost.forms.messages.nccl import CollectiveFit
from perfmodel.cost.forms.roofline import FamilyFit, roofline_time
from perfmodel.files.base import Spec
from perfmodel.files.validation import unknown_key
from perfmodel.ops.work import Work


class Form(NamedTuple):
    """The spec of a form's fits, and its timing function."""

    fit: type[Spec]
    time: Callable[[Work, Any, DeviceFacts], OperatorTime]


# By the name that stands as `form` in a file; a fit without one is a roofline.
FORMS: dict[str, Form] = {
    "roofline": Form(FamilyFit, roofline_time),
    "flash_decode": Form(FlashDecodeFit, decode_time),
    "flash_prefill": Form(FlashPrefillFit, prefill_time),
    "mixed_attention": Form(MixedAttentionFit, mixed_time),
    "latent_decode": Form(LatentDecodeFit, latent_decode_time),
    "latent_prefill": Form(LatentPrefillFit, latent_prefill_time),
    "collective": Form(CollectiveFit, collective_time),
    "custom_all_reduce": Form(CustomAllReduceFit, custom_time),
    "expert_exchange": Form(ExchangeFit, exchange_time),
    "tiled_gemm": Form(TiledGemmFit, time_gemm),
    "grouped_experts": Form(GroupedExpertsFit, time_experts),
    "block_matmul": Form(BlockMatmulFit, block_matmul_time),
    "block_stream": Form(BlockStreamFit, block_stream_time),
    "on_host": Form(OnHostFit, on_host_time),
}


@dataclass(frozen=True, slots=True)
class _ByForm:
    """A field that holds a fit of any form in `FORMS`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validated)

    def _validated(self, value: Any) -> Any:
        if isinstance(value, tuple(form.fit for form in FORMS.values())):
            return value
        name = str(value.get("form", "roofline")) if isinstance(value, dict) else "roofline"
        if name not in FORMS:
            raise ValueError(f"found form {name!r}, allowed {', '.join(FORMS)}")
        fit = FORMS[name].fit
        unknown = [key for key in value if key not in fit.model_fields] if isinstance(value, dict) else []
        if unknown:
            raise ValidationError.from_exception_data(name, [_unknown(str(key), value[key], fit) for key in unknown])
        return fit.model_validate(value)


def _unknown(key: str, value: Any, fit: type[Spec]) -> InitErrorDetails:
    """The error for an unknown key, raised here, where the form's keys are known."""
    error = PydanticCustomError("value_error", "{error}", {"error": unknown_key(key, fit)})
    return InitErrorDetails(type=error, loc=(key,), input=value)


if TYPE_CHECKING:

    class FormFit(Protocol):
        """A fit of any form."""

        @property
        def form(self) -> str: ...
        @property
        def residuals(self) -> Residuals: ...
        def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...
        def model_dump(self, *, exclude: set[str] | None = None) -> dict[str, Any]: ...

else:
    FormFit = Annotated[Any, _ByForm()]


def time_work(work: Work, fit: FormFit, device: DeviceFacts) -> OperatorTime:
    """The time of one run of `work` under `fit`."""
    return FORMS[fit.form].time(work, fit, device)
