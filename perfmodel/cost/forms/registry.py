"""All forms: what a calibration's `families` may hold, and how each is timed.

To add a form, write its file, add its fit to `FormFit` and its function to `_TIMES`.
"""

__all__ = ["FormFit", "time_work"]

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from perfmodel.cost.forms.attention.decode import FlashDecodeFit, decode_time
from perfmodel.cost.forms.attention.latent import (
    LatentDecodeFit,
    LatentPrefillFit,
    latent_decode_time,
    latent_prefill_time,
)
from perfmodel.cost.forms.attention.mixed import MixedAttentionFit, mixed_time
from perfmodel.cost.forms.attention.prefill import FlashPrefillFit, prefill_time
from perfmodel.cost.forms.device import DeviceFacts, OperatorTime
from perfmodel.cost.forms.experts import GroupedExpertsFit, time_experts
from perfmodel.cost.forms.gemm import TiledGemmFit, time_gemm
from perfmodel.cost.forms.messages.collective import CustomAllReduceFit, collective_time, custom_time
from perfmodel.cost.forms.messages.exchange import ExchangeFit, exchange_time
from perfmodel.cost.forms.messages.nccl import CollectiveFit
from perfmodel.cost.forms.roofline import FamilyFit, roofline_time
from perfmodel.ops.work import Work


def _form(value: Any) -> str:
    """A fit without a `form` is a roofline."""
    form = value.get("form", "roofline") if isinstance(value, dict) else getattr(value, "form", "roofline")
    return str(form)


FormFit = Annotated[
    Annotated[FamilyFit, Tag("roofline")]
    | Annotated[FlashDecodeFit, Tag("flash_decode")]
    | Annotated[FlashPrefillFit, Tag("flash_prefill")]
    | Annotated[MixedAttentionFit, Tag("mixed_attention")]
    | Annotated[LatentDecodeFit, Tag("latent_decode")]
    | Annotated[LatentPrefillFit, Tag("latent_prefill")]
    | Annotated[CollectiveFit, Tag("collective")]
    | Annotated[CustomAllReduceFit, Tag("custom_all_reduce")]
    | Annotated[ExchangeFit, Tag("expert_exchange")]
    | Annotated[TiledGemmFit, Tag("tiled_gemm")]
    | Annotated[GroupedExpertsFit, Tag("grouped_experts")],
    Discriminator(_form),
]

_TIMES: dict[str, Callable[[Work, Any, DeviceFacts], OperatorTime]] = {
    "collective": collective_time,
    "custom_all_reduce": custom_time,
    "expert_exchange": exchange_time,
    "flash_decode": decode_time,
    "flash_prefill": prefill_time,
    "grouped_experts": time_experts,
    "latent_decode": latent_decode_time,
    "latent_prefill": latent_prefill_time,
    "mixed_attention": mixed_time,
    "roofline": roofline_time,
    "tiled_gemm": time_gemm,
}


def time_work(work: Work, fit: FormFit, device: DeviceFacts) -> OperatorTime:
    """How long one run of `work` takes under `fit`."""
    return _TIMES[fit.form](work, fit, device)
