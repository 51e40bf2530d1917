"""Modules of latent attention, by hand: projections, the attention inside, activations, and no less than the floor."""

import numpy as np
import pytest

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.attention.decode import DecodeSizes, decode_seconds
from perfmodel.cost.kernel_models.attention.latent import (
    LatentDecodeFit,
    LatentPrefillFit,
    LatentSizes,
    latent_decode_seconds,
    latent_prefill_seconds,
)
from perfmodel.cost.kernel_models.attention.prefill import PrefillSizes, prefill_seconds
from perfmodel.ops.problem_sizes import DecodeSize, HeadShape
from perfmodel.specs import load_hardware

H200 = DeviceFacts.of(load_hardware("h200-sxm"))
BF16, FP8, BANDWIDTH = H200.peak("bf16"), H200.peak("fp8"), H200.bandwidth
WEIGHTS = 1.9e8  # of the projections of a layer of DeepSeek-V3


def one(value: float) -> np.ndarray:  # type: ignore[type-arg]
    return np.array([float(value)])


def prompt(tokens: float) -> PrefillSizes:
    heads = HeadShape(*map(one, (128, 128, 192, 128, 2, 0)))
    return PrefillSizes(heads, *map(one, (tokens, 0, 1, 128 * 320 * 2, 128 * 320 * 2)))


def prefill(tokens: float, activation_bytes: float = 0.0, weight_bytes: float = 2.0, floor_s: float = 1e-6) -> float:
    sizes = LatentSizes(*map(one, (tokens, WEIGHTS, weight_bytes, 0, activation_bytes)), prompt(tokens))
    fit = LatentPrefillFit(gemm_fraction=0.5, weight_fraction=0.5, activation_fraction=0.25, floor_s=floor_s)
    return float(latent_prefill_seconds(sizes, fit, H200)[0])


def test_a_prompts_module_is_its_launch_projections_attention_and_activations() -> None:
    """4,096 tokens through 190 M weights: two FLOPs each, at half the peak; and activations at a quarter of the
    bandwidth."""
    attention = float(prefill_seconds(prompt(4096), LatentPrefillFit().attention, H200).compute[0])
    projections = 2 * 4096 * WEIGHTS / (0.5 * BF16)
    assert prefill(4096) == pytest.approx(3e-5 + projections + attention)
    assert prefill(4096, 1e8) - prefill(4096) == pytest.approx(1e8 / (0.25 * BANDWIDTH))


def test_a_short_prompts_projections_take_as_long_as_their_weights() -> None:
    """One token reads all weights, at half the bandwidth, twice as fast where they have one byte."""
    two, half = prefill(1), prefill(1, weight_bytes=1.0)
    assert two - half == pytest.approx((2 - 1) * WEIGHTS / (0.5 * BANDWIDTH))


def test_fp8_projections_multiply_at_their_own_rate() -> None:
    saved = 2 * 4096 * WEIGHTS / 0.5 * (1 / BF16 - 1 / FP8)
    assert prefill(4096) - prefill(4096, weight_bytes=1.0) == pytest.approx(saved)


def test_no_module_is_faster_than_its_floor() -> None:
    assert prefill(1, floor_s=1e-3) == 1e-3


@pytest.mark.parametrize("seqs", [1, 64, 4096])
def test_a_decodes_module_absorbs_two_projections_in_bf16(seqs: int) -> None:
    """Whatever the format of the others: their weights are read once or multiplied with each token."""
    latent = DecodeSize(HeadShape(*map(one, (128, 1, 576, 512, 2, 0))), one(seqs), one(2000 * seqs))
    attention = DecodeSizes(latent, *map(one, (2000, 576 * 2, 0, 2 * (576 + 512))))
    absorbed = 3.3e7
    fit = LatentDecodeFit(gemm_fraction=0.5, weight_fraction=0.5, floor_s=1e-6)

    def seconds(absorbed: float, activation_bytes: float = 0.0) -> float:
        sizes = LatentSizes(*map(one, (seqs, WEIGHTS, 1, absorbed, activation_bytes)), attention)
        return float(latent_decode_seconds(sizes, fit, H200)[0])

    inside = float(decode_seconds(attention, fit.attention, H200).duration[0]) - fit.attention.launch_s
    projections = max(2 * seqs * WEIGHTS / (0.5 * FP8), WEIGHTS / (0.5 * BANDWIDTH))
    assert seconds(0) == pytest.approx(3e-5 + projections + inside)
    both = max(2 * seqs * absorbed / (0.5 * BF16), 2 * absorbed / (0.5 * BANDWIDTH))
    assert seconds(absorbed) - seconds(0) == pytest.approx(both)
    assert seconds(0, 1e7) - seconds(0) == pytest.approx(1e7 / (0.5 * BANDWIDTH))
