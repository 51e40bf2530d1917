"""Weights in fewer bits: how wrong rounding can make them, and that each operator multiplies by what is stored."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN, MoEFFN  # noqa: E402
from perfmodel.models.number_formats import METHODS, with_quantization  # noqa: E402
from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel_executors.kernels import KERNELS, load_kernels  # noqa: E402
from perfmodel_executors.kernels.apply_linear import OPERATORS, apply_linear  # noqa: E402
from perfmodel_executors.kernels.linear import quantize_tokens_int8  # noqa: E402
from perfmodel_executors.kernels.weight_formats import (  # noqa: E402
    Int4Int8Weight,
    Int4Weight,
    Int8Weight,
    dequantize,
    fp4_from_pairs,
    quantize_fp8,
    quantize_fp8_block,
    quantize_gguf,
    quantize_int4,
    quantize_int4_int8,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_signs,
    sparsify_24,
)
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder, load_decoder  # noqa: E402
from perfmodel_executors.models.smoothing import loads_smoothed  # noqa: E402

FORMATS = {
    "int8": quantize_int8,
    "w8a8": lambda w: quantize_int8(w, quantizes_input=True),
    "int4": quantize_int4,
    "int4 with zeros": lambda w: quantize_int4(w, group_size=64, has_zeros=True),
    "int4 by row": lambda w: quantize_int4(w, group_size=0),
    "fp8": quantize_fp8,
    "fp8 per tensor": lambda w: quantize_fp8(w, per_tensor=True),
    "fp8 weight only": lambda w: quantize_fp8(w, quantizes_input=False),
    "fp8 blocks": quantize_fp8_block,
    "mxfp4": quantize_mxfp4,
    "nvfp4": quantize_nvfp4,
    "2:4": sparsify_24,
    "w4a8": quantize_int4_int8,
    "q4_0": lambda w: quantize_gguf(w, "q4_0"),
    "q6_k": lambda w: quantize_gguf(w, "q6_k"),
}


def num_bytes(weight):
    return sum(tensor.nbytes for tensor in weight.tensors.values())


def random_weight(n=96, k=256, dtype=torch.float32):
    """Rows of different scale, one of them zero."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0, 3, n)[:, None]
    return (torch.randn(n, k, generator=generator) * scales + scales / 2).to(dtype)


def test_integer_codes_are_at_most_half_a_step_off():
    weight = random_weight()
    int8 = quantize_int8(weight)
    assert ((dequantize(int8) - weight).abs() <= int8.scales_N[:, None] * 0.501).all()
    for has_zeros in (False, True):
        int4 = quantize_int4(weight, group_size=64, has_zeros=has_zeros)
        steps = int4.scales_GN.T.repeat_interleave(64, dim=1)
        assert ((dequantize(int4) - weight).abs() <= steps * 0.501).all()


def test_progressive_groups_are_int8_numbers_half_a_step_off():
    """Lin et al. 2024 (QServe), 4.1: within 119 and half a step of 16, so that no INT8 number overflows; what is lost
    is half a step of the group beside half a step of the output."""
    weight = random_weight()
    stored = quantize_int4_int8(weight, group_size=64)
    values = stored.int8_values()
    assert values.dtype == torch.int8
    assert int(values.int().abs().max()) <= 127
    steps = stored.scales_GN.T.float()
    assert (steps <= 16).all()
    assert torch.equal(
        values.int().view(96, -1, 64) % steps[..., None].int(), torch.zeros(96, 4, 64, dtype=torch.int32)
    )
    bound = (steps.repeat_interleave(64, dim=1) / 2 + 0.5) * stored.row_scales_N[:, None]
    assert ((dequantize(stored) - weight).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("has_zeros", [False, True])
def test_smaller_groups_are_rounded_less(has_zeros):
    weight = random_weight()
    errors = [(dequantize(quantize_int4(weight, size, has_zeros)) - weight).norm() for size in (32, 64, 128, 0)]
    assert errors == sorted(errors)
    by_row = quantize_int4(weight, 0, has_zeros)
    assert (by_row.scales_GN == by_row.scales_GN[:1]).all()


def test_zero_points_halve_the_step_of_one_sided_weights():
    """Of weights 0..a, half of a symmetric code's values are never used."""
    weight = random_weight().abs()
    errors = [(dequantize(quantize_int4(weight, has_zeros=z)) - weight).pow(2).mean() for z in (False, True)]
    assert errors[1] < errors[0] / 3


def test_e4m3_is_within_half_a_bit_of_its_mantissa():
    """Three bits of mantissa: 2^-4 of the value; the smallest step is 2^-9 of the scale."""
    weight = random_weight()
    for per_tensor in (False, True):
        stored = quantize_fp8(weight, per_tensor)
        bound = torch.maximum(weight.abs() / 16, stored.scales_N[:, None] * 2.0**-10)
        assert ((dequantize(stored) - weight).abs() <= bound * 1.001).all()


def test_blocks_of_e4m3_are_as_close_as_their_scale_allows():
    """... whose least step is 2^-9 of a scale; 200 x 300 has two by three blocks, none of the last is whole."""
    weight = random_weight(200, 300)
    stored = quantize_fp8_block(weight)
    assert stored.scales_RG.shape == (2, 3)
    steps = stored.scales_RG.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert ((dequantize(stored) - weight).abs() <= torch.maximum(weight.abs() / 16, steps * 2.0**-10) * 1.001).all()


@pytest.mark.parametrize(("quantize", "group"), [(quantize_mxfp4, 32), (quantize_nvfp4, 16)])
def test_4_bit_floats_are_within_half_a_step_of_e2m1(quantize, group):
    """Steps are 0.5, 1 and 2 of a scale, below 2, 4 and 8 of it; MXFP4 lets magnitudes from 6 to 8 of it saturate."""
    weight = random_weight()
    stored = quantize(weight)
    assert stored.group_size == group
    units = weight.view(len(weight), -1, group).abs().amax(2).clamp_min(1e-30)
    if group == 32:
        units = torch.exp2(torch.floor(torch.log2(units)) - 2)
    else:
        units = units / 6 * (1 + 2.0**-4) + stored.row_scales_N[:, None] * 2.0**-9  # a scale in E4M3, or its least
    units = units.repeat_interleave(group, dim=1)
    share = weight.abs() / units
    steps = torch.where(share < 2, 0.25, torch.where(share < 4, 0.5, 1.0)) + (share > 7) * 1.0
    assert ((dequantize(stored) - weight).abs() <= steps * units * 1.07).all()


def test_mxfp4_of_a_file_is_read_code_by_code():
    """Bytes 0x21 are 0.5 and 1, 0xF7 6 and -6; exponents 127 and 128 are 1 and 2 (OCP MX 1.0)."""
    blocks = torch.tensor([0x21, 0xF7], dtype=torch.uint8)[None, :, None].expand(1, 2, 16)
    stored = fp4_from_pairs(blocks, torch.tensor([[127, 128]], dtype=torch.uint8))
    expected = torch.tensor([0.5, 1.0] * 16 + [12.0, -12.0] * 16)
    assert torch.equal(dequantize(stored)[0], expected)
    again = quantize_mxfp4(dequantize(stored))
    assert torch.equal(dequantize(again)[0], expected)


def test_two_of_four_keep_the_largest_exactly():
    weight = random_weight()
    dense = dequantize(sparsify_24(weight))
    fours, kept = weight.view(-1, 4), dense.view(-1, 4)
    assert ((kept != 0).sum(1) <= 2).all()
    assert torch.equal(kept[kept != 0], fours[kept != 0])
    torch.testing.assert_close(kept.abs().sum(1), fours.abs().topk(2, dim=1).values.sum(1))


def test_stored_sizes_are_the_formats():
    """Bits of a weight, and its share of the scales: 32 bits a row of 256, 16 a group of 128."""
    weight = random_weight(dtype=torch.bfloat16)
    sizes = {name: num_bytes(quantize(weight)) * 8 / weight.numel() for name, quantize in FORMATS.items()}
    assert sizes["int8"] == sizes["fp8"] == 8 + 32 / 256
    assert sizes["int4"] == 4 + 16 / 128
    assert sizes["w4a8"] == 4 + (8 + 8) / 128 + 32 / 256
    assert sizes["2:4"] == 16 / 2 + 1
    assert sizes["mxfp4"] == 4 + 8 / 32
    assert sizes["nvfp4"] == 4 + 8 / 16 + 32 / 256
    assert sizes["fp8 blocks"] == 8 + 32 / (96 * 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("name", FORMATS)
def test_each_operator_multiplies_by_what_is_stored(name, rows, dtype):
    """Weight-only: the product with the dequantised weight, up to rounding. Quantised activations: half a step each,
    of 127 (INT8) or 2^-4 of the value (e4m3), summed with random signs."""
    stored = FORMATS[name](random_weight(dtype=dtype))
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(96, generator=torch.Generator().manual_seed(2)).to(dtype)
    actual = apply_linear(load_kernels(), x, stored, bias).double()
    expected = x.double() @ dequantize(stored).double().T + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 1.2e-2
    if stored.quantizes_input:
        tolerance += 0.02 if isinstance(stored, Int8Weight | Int4Int8Weight) else 0.05
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_every_format_has_an_operator():
    assert set(OPERATORS.values()) <= set(KERNELS)
    weight = random_weight()
    for quantize in FORMATS.values():
        stored = quantize(weight)
        assert (type(stored), stored.quantizes_input) in OPERATORS


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(PerfmodelError, match="has no whole groups of 128"):
        quantize_int4(torch.zeros(4, 192))
    with pytest.raises(PerfmodelError, match="12 inputs"):
        sparsify_24(torch.zeros(4, 12))
    with pytest.raises(PerfmodelError, match="packed 64 inputs at a time"):
        quantize_mxfp4(torch.zeros(4, 96))


def logits_of(decoder):
    tokens = torch.randint(101, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    cache = decoder.new_cache(4, 8)
    return decoder.forward(build_batch([TokenSegment(tokens, 0, [0, 1, 2])], 4), cache)


@pytest.mark.parametrize("method", ["w8a16", "int8", "fp8", "fp8_w8a16"])
def test_a_quantised_decoder_says_much_the_same_and_differs(method):
    """Its embedding and LM head stay; its linear layers are rounded to three bits or more."""
    model = tiny((attention(), DenseFFN(48)))
    plain = Decoder(model, torch.float32, seed=1)
    quantised = Decoder(with_quantization(model, method), torch.float32, seed=1)
    assert isinstance(quantised.weights.lm_head, torch.Tensor)
    assert not isinstance(quantised.weights.layers[0].ffn.up, torch.Tensor)
    ours, theirs = logits_of(quantised), logits_of(plain)
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).norm() < 0.15 * theirs.norm()


@pytest.mark.parametrize(("method", "size"), [("mxfp4", None), ("nvfp4", None), ("fp8_block", None), ("w4a8_int8", 64)])
def test_formats_in_groups_are_served(method, size):
    """MXFP4 is some 13 % off in each of the four matrices that x passes, 26 % together, before attention and the
    activation add theirs; a model of other weights would be off by sqrt(2)."""
    model = tiny((attention(head_dim=16, v_head_dim=16), DenseFFN(128)), hidden_size=64)
    plain = Decoder(model, torch.float32, seed=1)
    quantised = Decoder(with_quantization(model, method, size), torch.float32, seed=1)
    ours, theirs = logits_of(quantised), logits_of(plain)
    assert 0 < (ours - theirs).norm() < 0.5 * theirs.norm()


def test_outliers_are_multiplied_unquantised():
    """One column is 100 times the others: INT8 with a scale per token has few steps left for those; apart it has all.
    Without a column above the threshold the product is that of W8A8."""
    weight = random_weight(dtype=torch.float32)
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    kernels, apart = load_kernels(), quantize_int8(weight, True, 6.0)
    together = quantize_int8(weight, True)
    assert torch.equal(apply_linear(kernels, x, apart), apply_linear(kernels, x, together))
    x[:, 17] *= 100
    errors = [(apply_linear(kernels, x, w) - x @ dequantize(w).T).norm() for w in (apart, together)]
    assert errors[0] < errors[1] / 10


def test_formats_without_a_kernel_are_refused_by_name():
    model = tiny((attention(), DenseFFN(48)))
    for method in ("mxfp8", "w4a8", "bitsandbytes"):
        assert METHODS[method].weights
        with pytest.raises(PerfmodelError, match=r"set engine\.quantization to one of"):
            Decoder(with_quantization(model, method))


def test_layers_are_stored_as_their_rules_say():
    """Feed-forward in INT4, attention in INT8, the last layer plain; a rule for all is the same as one format."""
    model = tiny((attention(), DenseFFN(64)), (attention(), DenseFFN(64)))
    rules = [
        {"quantization": "w4a16", "group_size": 32, "components": ["dense_ffn"]},
        {"layers": [-1], "quantization": "none"},
    ]
    mixed = load_decoder(model, EngineSpec(dtype="float32", quantization="w8a16", quantization_by_layer=rules), seed=1)
    first, last = mixed.weights.layers
    assert [type(first.mixer.qkv), type(first.ffn.up)] == [Int8Weight, Int4Weight]
    assert isinstance(last.mixer.out, torch.Tensor)
    assert isinstance(last.ffn.down, torch.Tensor)
    uniform = load_decoder(model, EngineSpec(dtype="float32", quantization="w8a16"), seed=1)
    ruled = load_decoder(model, EngineSpec(dtype="float32", quantization_by_layer=[{"quantization": "w8a16"}]), seed=1)
    assert torch.equal(logits_of(uniform), logits_of(ruled))
    assert not torch.equal(logits_of(uniform), logits_of(mixed))


@pytest.mark.parametrize("bits", [2, 1])
def test_signs_are_those_of_bitnet(bits):
    """Ternary: w over its mean magnitude, rounded and cut to -1, 0, 1; binary: the sign of w less its mean."""
    weight = random_weight()
    scale = weight.abs().mean()
    expected = (weight / scale).round().clamp(-1, 1) if bits == 2 else torch.where(weight > weight.mean(), 1.0, -1.0)
    packed = quantize_signs(weight, bits)
    torch.testing.assert_close(dequantize(packed), expected * scale)
    assert num_bytes(packed) == weight.numel() * bits / 8 + 4
    with pytest.raises(PerfmodelError, match="cannot be packed"):
        quantize_signs(torch.ones(4, 9), bits)


@pytest.mark.parametrize("bits", [2, 1])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])  # field by field, and unpacked for one product
def test_products_with_signs_are_those_of_the_matrix(bits, num_tokens):
    weight = quantize_signs(random_weight(), bits)
    x = torch.randn(num_tokens, 256, generator=torch.Generator().manual_seed(3))
    codes, scales = quantize_tokens_int8(x)
    expected = (codes.float() * scales[:, None]) @ dequantize(weight).T
    found = apply_linear(load_kernels(), x, weight, torch.full((96,), 0.5)) - 0.5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_smoothing_moves_outliers_of_activations_into_weights():
    """One column is 60 times as large as the others, whose digits each token's own scale loses: Xiao et al. 2023."""
    model, engine = tiny((attention(), DenseFFN(48)), hidden_size=64), EngineSpec(dtype="float32")
    plain = load_decoder(model, engine)
    norm, qkv = plain.weights.layers[0].mixer_norm, plain.weights.layers[0].mixer.qkv
    norm[5] = 60.0
    (smoothed,) = loads_smoothed(with_quantization(model, "smoothquant"), lambda _: plain, 0).layers
    x, kernels = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)), load_kernels()
    expected = kernels.rms_norm(x, norm, 1e-5) @ qkv.T
    static = apply_linear(kernels, kernels.rms_norm(x, smoothed.mixer_norm, 1e-5), smoothed.mixer.qkv)
    dynamic = apply_linear(kernels, kernels.rms_norm(x, norm, 1e-5), quantize_int8(qkv, quantizes_input=True))
    errors = [((found - expected).norm() / expected.norm()).item() for found in (static, dynamic)]
    assert errors[0] < 0.6 * errors[1]
    whole = dequantize(smoothed.mixer.qkv) * smoothed.mixer_norm  # the same product, whatever the smoothing
    torch.testing.assert_close(whole, qkv * norm, rtol=0.05, atol=0.05)


def test_scales_known_beforehand_saturate():
    weight = replace(quantize_int8(torch.eye(8), quantizes_input=True), input_scale=torch.tensor(2.0 / 127))
    x = torch.tensor([[1.0, 2.0, 50.0, -50.0, 0.0, -1.0, 0.5, 2.0]])
    expected = torch.tensor([[1.0, 2.0, 2.0, -2.0, 0.0, -1.0, 0.5, 2.0]])
    torch.testing.assert_close(apply_linear(load_kernels(), x, weight), expected, atol=0.01, rtol=0)


def test_smoothquant_is_served_with_static_scales():
    model = tiny((attention(), DenseFFN(48)))
    decoder = load_decoder(model, EngineSpec(dtype="float32", quantization="smoothquant"))
    matrices = [decoder.weights.layers[0].mixer.qkv, decoder.weights.layers[0].mixer.out]
    matrices += [decoder.weights.layers[0].ffn.up, decoder.weights.layers[0].ffn.down]
    assert all(matrix.input_scale is not None for matrix in matrices)
    experts = tiny((attention(), MoEFFN(4, 2, 16)))
    with pytest.raises(PerfmodelError, match="SmoothQuant is executed for attention and dense blocks"):
        load_decoder(experts, EngineSpec(dtype="float32", quantization="smoothquant"))


def test_random_weights_have_outliers_where_those_are_multiplied_apart(monkeypatch):
    model = tiny((attention(), DenseFFN(48)))
    decoder = load_decoder(model, EngineSpec(dtype="float32", quantization="llm_int8"))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    behind = load_kernels().rms_norm(x, decoder.weights.layers[0].mixer_norm, 1e-5)
    assert ((behind.abs() > 6).any(dim=0).nonzero() == 0).all()
    assert (behind.abs() > 6).any()
