"""Laws of linear layers and of sampling that hold whatever the tiles: in Triton's interpreter, on a CPU."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.launch import Options  # noqa: E402
from perfmodel_executors.kernels.sampling import DRAW_BITS  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig  # noqa: E402
from perfmodel_executors.kernels.weight_formats import (  # noqa: E402
    dequantize,
    quantize_fp8,
    quantize_fp8_block,
    quantize_int4,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
)

KERNELS = load_kernels("triton")
M, N, K = 5, 48, 640
FEW = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}
MANY = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 128, "DESCRIPTORS": 0}


def inputs(rows=M):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, K, generator=generator), torch.randn(N, K, generator=generator) / K**0.5


def cut(operator, x, weight, slices, sizes):
    return getattr(KERNELS, operator)(x, weight, None, config=TileConfig({**sizes, "SPLIT_K": slices}, Options(4, 2)))


@pytest.mark.parametrize(
    ("operator", "quantize", "sizes"),
    [
        ("linear", None, FEW),
        ("linear", None, MANY),
        ("linear", None, {**MANY, "DESCRIPTORS": 1}),
        ("linear_w8a16", quantize_int8, FEW),
        ("linear_w4a16", quantize_int4, FEW),
        ("linear_w8a8", lambda w: quantize_int8(w, quantizes_input=True), FEW),
        ("linear_fp8", quantize_fp8, FEW),
        ("linear_fp8_block", quantize_fp8_block, FEW),
        ("linear_w4a16", quantize_mxfp4, FEW),
        ("linear_w4a16", quantize_nvfp4, FEW),
    ],
)
def test_slices_of_k_add_up_to_the_whole(operator, quantize, sizes):
    """3 slices of 5 blocks: the last is shorter; 5: one block each. Their order is fixed: equal bits each time."""
    x, weight = inputs()
    weight = quantize(weight) if quantize else weight
    whole = cut(operator, x, weight, 1, sizes)
    for slices in (3, 5):
        parts = cut(operator, x, weight, slices, sizes)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
        assert torch.equal(parts, cut(operator, x, weight, slices, sizes))


def test_descriptors_load_what_pointers_do():
    x, weight = inputs(rows=70)
    loads = [cut("linear", x, weight, 1, {**MANY, "DESCRIPTORS": way}) for way in (0, 1)]
    torch.testing.assert_close(loads[0], loads[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_an_int4_product_is_that_with_the_dequantised_weight(groups, has_zeros):
    x, weight = inputs()
    stored = quantize_int4(weight[:, :512].contiguous(), has_zeros=has_zeros)
    sizes = {**FEW, "BLOCK_K": 128 * groups}
    actual = cut("linear_w4a16", x[:, :512], stored, 1, sizes)  # rows of x lie apart, too
    torch.testing.assert_close(actual, x[:, :512] @ dequantize(stored).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantize", [quantize_mxfp4, quantize_nvfp4])
def test_a_product_in_4_bit_floats_is_that_with_the_dequantised_weight(quantize):
    """All codes and a wide range of scales: rows differ by 2^12."""
    x, weight = inputs()
    stored = quantize(weight * torch.logspace(-6, 6, N, base=2)[:, None])
    actual = KERNELS.linear_w4a16(x, stored)
    torch.testing.assert_close(actual, x @ dequantize(stored).T, rtol=1e-5, atol=1e-4)


def test_sums_of_blocks_keep_their_own_scales():
    """A block 1,000 times larger than its neighbours does not coarsen them; each is off by e4m3's rounding of x."""
    x, weight = inputs()
    x[:, :128] *= 1000
    weight[:, :128] = 0
    stored = quantize_fp8_block(weight)
    actual = KERNELS.linear_fp8_block(x, stored)
    expected = x @ dequantize(stored).T
    assert (actual - expected).norm() < 0.04 * expected.norm()


def test_greedy_takes_the_first_of_equal_logits_in_whichever_piece():
    logits = torch.zeros(4, 20_000)
    for row, places in enumerate(([3, 19_999], [8191, 8192], [12_000, 18_000], [0, 1])):
        logits[row, places] = 1.0
    assert KERNELS.greedy(logits).tolist() == [3, 8191, 12_000, 0]
    assert KERNELS.greedy(torch.full((1, 300), -torch.inf)).tolist() == [0]


def test_sampling_keeps_equal_logits_together_and_nothing_else():
    """Three tokens share the second place: top-2 keeps four, whatever is drawn."""
    row = torch.full((200,), -4.0)
    row[[150, 7, 90]], row[40] = 1.0, 2.0
    draws = 10
    numbers = (torch.linspace(0, 0.999, draws) * (1 << DRAW_BITS)).long()
    ones, zeros = torch.ones(draws), torch.zeros(draws, dtype=torch.int32)
    for top_k, top_p in ((zeros + 2, ones), (zeros, ones * 0.5), (zeros + 2, ones * 0.6)):
        arguments = (row.expand(draws, -1), numbers, ones, top_k, top_p)
        drawn = KERNELS.sample_top_k_top_p(*arguments)
        assert torch.equal(drawn, load_kernels().sample_top_k_top_p(*arguments))
        assert set(drawn.tolist()) == {7, 40, 90, 150}


def test_one_setting_for_all_rows_draws_as_one_for_each():
    """A run has one setting, whose tensor is read again for each row."""
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 3
    numbers = torch.arange(6) * (1 << DRAW_BITS) // 6
    settings = [torch.tensor([value]) for value in (0.7, 40, 0.9, 0.001)]
    settings[1] = settings[1].int()
    one = KERNELS.sample_top_k_top_p(logits, numbers, *(each.expand(6) for each in settings))
    each = KERNELS.sample_top_k_top_p(logits, numbers, *(each.repeat(6) for each in settings))
    assert torch.equal(one, each)
    assert torch.equal(one, load_kernels().sample_top_k_top_p(logits, numbers, *(each.repeat(6) for each in settings)))
    assert len(set(one.tolist())) > 3
