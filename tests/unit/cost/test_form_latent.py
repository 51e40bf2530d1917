"""Modules of latent and of other attention, by hand: projections, the attention inside, activations, and a floor."""

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
from perfmodel.cost.kernel_models.module import ModuleFit, ModuleSizes, module_seconds
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


def module(device: DeviceFacts = H200, tokens: int = 300, launches: int = 0, **changes: float) -> float:
    """Tokens through 1e8 weights of one byte; 66 thread blocks of attention, and ten serial steps."""
    fit = {"gemm_fraction": 0.5, "weight_fraction": 0.5, "tensor_fraction": 0.25, "index_fraction": 0.5}
    fit |= {"kv_fraction": 0.5, "memory_fraction": 0.5, "launch_s": 2e-5, "step_s": 1e-6, "floor_s": 1e-6, "knee": 1.0}
    sizes = ModuleSizes(*map(one, (tokens, 1e8, 1, 1e9, 5e8, 1e7, 1e9, 66, 10, launches)), "fp8")
    return float(module_seconds(sizes, ModuleFit(**fit | changes), device).duration[0])


@pytest.mark.parametrize(("tokens", "rows"), [(10, 64), (300, 320)])
def test_any_module_is_the_sum_of_its_parts(tokens: int, rows: int) -> None:
    """Tiles of 64 rows pad 300 tokens to 320; of 10 tokens the weights take longer than the products. 66 blocks fill
    half of 132 units, so attention has half of each rate; a knee of 1 adds its products and bytes. L2 does not hold
    1 GB of activations."""
    projections = max(2 * rows * 1e8 / (0.5 * FP8), 1e8 / (0.5 * BANDWIDTH))
    attention = (1e9 / 0.25 + 5e8 / 0.5) / (BF16 / 2) + 1e7 / (0.5 * BANDWIDTH / 2)
    by_hand = 2e-5 + projections + attention + 1e9 / (0.5 * BANDWIDTH) + 10 * 1e-6
    assert module(tokens=tokens) == pytest.approx(by_hand, rel=1e-6)
    assert module(tokens=tokens, cache_speedup=8.0) == module(tokens=tokens)
    assert module(tokens=tokens, floor_s=2 * by_hand) == 2 * by_hand


def test_kernels_that_the_host_launches_one_by_one_take_at_least_its_time() -> None:
    """640 sequences at 0.1 ms each; the device's own time hides behind them, or they behind it."""
    assert module(launches=640, host_s=1e-4) == pytest.approx(64e-3, rel=1e-3)
    assert module(launches=640, host_s=1e-9) == module()


def test_launches_and_floors_depend_on_whose_cpu_the_host_is() -> None:
    """The GPU maker's own (GH200) takes twice as long here; any other's is what was fitted."""
    own = DeviceFacts.of(load_hardware("gh200"))
    assert module(own, on_own_host=2.0) - module(own) == pytest.approx(2e-5)
    assert module(own, on_own_host=2.0, floor_s=5e-3) == 1e-2
    assert module(on_own_host=2.0) == module()
