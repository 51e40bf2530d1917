"""Attention over latents (MLA), measured as whole modules: projections and attention in one number.

    prompts  t = max(floor, launch + projections + attention + activations / (activation_fraction W))
    decode   t = max(floor, launch + projections + absorption + attention + activations / (weight_fraction W))
             projections = max( 2 n w / (gemm_fraction F_g),  w e_g / (weight_fraction W) )

n tokens, w weights of the projections in e_g bytes each at the tensor rate F_g. Prefill attention is
`attention_prefill` at expanded key and value sizes; decode attention is `attention_decode` with one KV head of the
latent's size, query heads padded to the tile's rows. `floor` is host time of eagerly launched modules: serving replays
graphs and pays neither it nor the projections, which are operators of their own. Only the number of heads separates the
fractions of projections and attention: neither means much alone."""

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.attention import decode, prefill
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Domain, Residuals
from perfmodel.files.base import Spec
from perfmodel.ops.problem_sizes import Values

_KERNEL_S = 5e-6  # launch of the attention kernel alone, which no module shows by itself [assumed]


class LatentPrefillFit(Spec):
    """A prefill module; as an operator's fit it times only the attention."""

    form: Literal["latent_prefill"] = "latent_prefill"
    domain: Domain = Domain()
    launch_s: float = Field(default=3e-5, ge=1e-6, le=1e-3)
    gemm_fraction: float = Field(default=0.6, ge=0.05, le=1.0)
    weight_fraction: float = Field(default=0.6, ge=0.05, le=1.0)
    tensor_fraction: float = Field(default=0.5, ge=0.02, le=1.0)
    activation_fraction: float = Field(default=0.5, ge=0.02, le=1.0)
    floor_s: float = Field(default=1e-4, ge=1e-6, le=1e-3)
    residuals: Residuals = Residuals()

    @property
    def attention(self) -> prefill.FlashPrefillFit:
        kernel = prefill.PrefillKernel(rows=128, keys=128, packs="never")
        update = {"kernel": kernel, "launch_s": _KERNEL_S, "tensor_fraction": self.tensor_fraction}
        return prefill.FlashPrefillFit(memory_fraction=self.activation_fraction).model_copy(update=update)


class LatentDecodeFit(Spec):
    """A decode module; as an operator's fit it times only the attention."""

    form: Literal["latent_decode"] = "latent_decode"
    kernel: decode.DecodeKernel = decode.DecodeKernel()
    domain: Domain = Domain()
    launch_s: float = Field(default=3e-5, ge=1e-6, le=1e-3)
    gemm_fraction: float = Field(default=0.5, ge=0.02, le=1.0)
    weight_fraction: float = Field(default=0.6, ge=0.05, le=1.0)
    tensor_fraction: float = Field(default=0.4, ge=0.02, le=1.0)
    memory_fraction: float = Field(default=0.7, ge=0.05, le=1.0)
    block_s: float = Field(default=2e-6, ge=1e-8, le=3e-5)
    floor_s: float = Field(default=1e-4, ge=1e-6, le=1e-3)
    residuals: Residuals = Residuals()

    @property
    def attention(self) -> decode.FlashDecodeFit:
        update = {
            "kernel": self.kernel,
            "launch_s": _KERNEL_S,
            "memory_fraction": self.memory_fraction,
            "tensor_fraction": self.tensor_fraction,
            "block_s": self.block_s,
            "group_traffic": 0.0,  # a single KV head, read once per tile of query heads
            "group_block": 0.0,
        }
        return decode.FlashDecodeFit().model_copy(update=update)


class LatentSizes(NamedTuple):
    """Modules: n tokens, projection weights, activation bytes, and the attention inside. absorbed: weights of decode's
    absorbing GEMMs, in the model's own format; weight_bytes: per projection weight"""

    tokens: Values
    weights: Values
    weight_bytes: Values
    absorbed: Values
    activation_bytes: Values
    attention: decode.DecodeSizes | prefill.PrefillSizes


def _projections(sizes: LatentSizes, fit: LatentPrefillFit | LatentDecodeFit, device: DeviceFacts) -> Values:
    narrow = np.where(sizes.weight_bytes < 1, device.peak("fp4"), device.peak("fp8"))
    rate = np.where(sizes.weight_bytes <= 1, narrow, device.peak("bf16"))
    compute = 2 * sizes.tokens * sizes.weights / (rate * fit.gemm_fraction)
    memory = sizes.weights * sizes.weight_bytes / (device.bandwidth * fit.weight_fraction)
    return np.maximum(compute, memory)


def latent_prefill_seconds(sizes: LatentSizes, fit: LatentPrefillFit, device: DeviceFacts) -> Values:
    assert isinstance(sizes.attention, prefill.PrefillSizes)
    attention = prefill.prefill_seconds(sizes.attention, fit.attention, device).compute
    activations = sizes.activation_bytes / (device.bandwidth * fit.activation_fraction)
    return np.maximum(fit.floor_s, fit.launch_s + _projections(sizes, fit, device) + attention + activations)


def latent_decode_seconds(sizes: LatentSizes, fit: LatentDecodeFit, device: DeviceFacts) -> Values:
    assert isinstance(sizes.attention, decode.DecodeSizes)
    attention = decode.decode_seconds(sizes.attention, fit.attention, device).duration - _KERNEL_S
    absorbed = np.maximum(
        2 * sizes.tokens * sizes.absorbed / (device.peak("bf16") * fit.gemm_fraction),
        2 * sizes.absorbed / (device.bandwidth * fit.weight_fraction),
    )
    activations = sizes.activation_bytes / (device.bandwidth * fit.weight_fraction)
    whole = fit.launch_s + _projections(sizes, fit, device) + absorbed + attention + activations
    return np.maximum(fit.floor_s, whole)
