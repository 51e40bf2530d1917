"""Mixtures of experts in fewer bits: each expert is what its linear layers would be, and a decoder of them serves."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402
from test_graphs import graphed, prefilled  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import MoEFFN  # noqa: E402
from perfmodel.models.number_formats import with_quantization  # noqa: E402
from perfmodel.models.params import weight_bytes  # noqa: E402
from perfmodel_executors.kernels.apply_linear import apply_linear  # noqa: E402
from perfmodel_executors.kernels.dispatch import load_kernels  # noqa: E402
from perfmodel_executors.kernels.moe import (  # noqa: E402
    ExpertLayer,
    grouped_experts,
    route,
)
from perfmodel_executors.kernels.stored_rows import ExpertWeight, quantize_experts  # noqa: E402
from perfmodel_executors.kernels.swiglu import activate  # noqa: E402
from perfmodel_executors.kernels.weight_formats import (  # noqa: E402
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
    sparsify_24,
)
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402

FORMATS = {
    "int8": quantize_int8,
    "w8a8": lambda w: quantize_int8(w, quantizes_input=True),
    "int4": lambda w: quantize_int4(w, group_size=32),
    "int4 with zeros": lambda w: quantize_int4(w, group_size=32, has_zeros=True),
    "fp8": quantize_fp8,
    "fp8 weight only": lambda w: quantize_fp8(w, quantizes_input=False),
    "mxfp4": quantize_mxfp4,
    "nvfp4": quantize_nvfp4,
}
# Error of a matrix, root mean square, as a share of its weights'. Of normal rows the largest is 2.4 to 2.8 standard
# deviations away (64 to 160 draws; in groups of 32: 2.1), and a code is off by a step / sqrt(12): 2.8 / 127 / 3.5 =
# 0.6 %, 2.1 / 7 / 3.5 = 9 %, with zeros 4.1 / 15 / 3.5 = 8 %; e4m3 is off by up to 2^-4 of a value, in the mean 2.6 %.
ERRORS = {"int8": 0.008, "w8a8": 0.008, "int4": 0.11, "int4 with zeros": 0.11, "fp8": 0.035, "fp8 weight only": 0.035}
ERRORS |= {"mxfp4": 0.14, "nvfp4": 0.11}  # steps of 0.5 to 2 of a scale that is 1/4 to 1/8, or 1/6 of the largest
MOE = MoEFFN(num_experts=6, top_k=2, intermediate_size=64)
WIDE = tiny((attention(), MOE), hidden_size=128)


def block(tokens=12, experts=6, width=128, inner=64, seed=0, dtype=torch.float32):
    """x, routing, up and down of gated experts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x, routing = normal(tokens, width).to(dtype), route(normal(tokens, experts), 2)
    return x, *routing, normal(experts, 2 * inner, width) / width**0.5, normal(experts, width, inner) / inner**0.5


@pytest.mark.parametrize("name", FORMATS)
def test_each_expert_is_its_own_linear_layer(name):
    """Scales belong to an expert's outputs: its part of the stack is what quantising it alone gives."""
    x, weights, experts, *matrices = block()
    up, down = (quantize_experts(matrix, FORMATS[name]) for matrix in matrices)
    alone = [[FORMATS[name](matrix[e]) for e in range(6)] for matrix in matrices]
    for stacked, own in zip((up, down), alone, strict=True):
        assert stacked.shape == (6, *own[0].shape)
        assert stacked[2] is stacked[2]
        for e in range(6):
            assert torch.equal(dequantize(stacked[e]), dequantize(own[e]))
    expected, kernels = torch.zeros_like(x), load_kernels()
    for t in range(len(x)):
        for share, e in zip(weights[t], experts[t].tolist(), strict=True):
            hidden = activate(apply_linear(kernels, x[t : t + 1], alone[0][e]), "silu", True)
            expected[t] += share * apply_linear(kernels, hidden, alone[1][e])[0]
    torch.testing.assert_close(grouped_experts(x, weights, experts, ExpertLayer(up, down)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_the_result_is_as_wrong_as_the_rounding_of_its_matrices(name):
    """Errors of three matrices add up as squares; SiLU's slope is at most 1.1. Quantised inputs err as the weights."""
    x, weights, experts, *matrices = block()
    up, down = (quantize_experts(matrix, FORMATS[name]) for matrix in matrices)
    for plain, stored in zip(matrices, (up, down), strict=True):
        assert (dequantize(stored.stacked).view_as(plain) - plain).norm() < ERRORS[name] * plain.norm()
    exact = grouped_experts(x, weights, experts, ExpertLayer(*matrices))
    actual = grouped_experts(x, weights, experts, ExpertLayer(up, down))
    sources = 3 * (2 if up.quantizes_input else 1)
    assert 0 < (actual - exact).norm() < 1.1 * sources**0.5 * ERRORS[name] * exact.norm()


def test_formats_without_grouped_products_are_refused():
    with pytest.raises(PerfmodelError, match="experts are not stored as Sparse24Weight; use int8, int4 or fp8"):
        quantize_experts(torch.zeros(2, 4, 16), sparsify_24)


@pytest.mark.parametrize("method", ["w8a16", "int8", "fp8", "fp8_w8a16", "w4a16", "awq"])
def test_a_quantised_mixture_says_much_the_same_and_keeps_its_router(method):
    model = tiny(
        (
            attention(num_heads=8, head_dim=16, v_head_dim=16),
            replace(MOE, intermediate_size=128, shared_intermediate_size=128),
        ),
        hidden_size=128,
    )
    tokens = torch.randint(101, (12,), generator=torch.Generator().manual_seed(3)).tolist()

    def logits(decoder):
        return decoder.forward(build_batch([TokenSegment(tokens, 0, [0, 1, 2])], 4), decoder.new_cache(4, 8))

    plain = Decoder(model, torch.float32, seed=1)
    quantised = Decoder(with_quantization(model, method), torch.float32, seed=1)
    ours, theirs = quantised.weights.layers[0].ffn, plain.weights.layers[0].ffn
    assert torch.equal(ours.router, theirs.router)
    assert isinstance(ours.up, ExpertWeight)
    assert isinstance(ours.down, ExpertWeight)
    assert not isinstance(ours.shared.up, torch.Tensor)
    # A token between two experts may take the other one, so that no rounding bounds it; unrelated logits are 1.4 apart.
    difference = (logits(quantised) - logits(plain)).norm() / logits(plain).norm()
    assert 0 < difference < 0.6


def test_stored_bytes_are_those_that_the_cost_model_counts():
    """But for the scales of outputs, 32 bits each, which the cost model leaves out."""
    model = with_quantization(WIDE, "w8a16")
    experts = Decoder(model, torch.bfloat16).weights.layers[0].ffn
    stored = sum(t.nbytes for part in (experts.up, experts.down) for t in part.stacked.tensors.values())
    scales = 4 * MOE.num_experts * (2 * MOE.intermediate_size + model.hidden_size)
    assert stored - scales == weight_bytes(model)["experts"]


@pytest.mark.parametrize("method", ["w8a16", "fp8"])
def test_graphed_and_eager_decoding_give_the_same_tokens(method):
    decoder = Decoder(with_quantization(MODELS["shared-experts"], method), torch.float32, seed=1)
    runner = graphed(decoder)
    segments = prefilled(decoder, runner, (17, 3, 30, 8, 12))
    replayed = runner.run(segments)
    with torch.inference_mode():
        assert replayed == decoder.step(build_batch(segments, runner.cache.block_size), runner.cache)
    assert [runner.run([segment])[0] for segment in segments] == replayed
