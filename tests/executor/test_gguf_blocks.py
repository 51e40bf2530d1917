"""Weights that stay in llama.cpp's blocks: read as its own package reads them, multiplied as if dequantised before."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import numpy as np  # noqa: E402
from executor_models import attention, tiny  # noqa: E402
from test_loading import FLOAT32, random_decoder, write_gguf  # noqa: E402

from perfmodel.errors import PerfmodelError, SpecError  # noqa: E402
from perfmodel.models.architecture import DenseFFN, MoEFFN  # noqa: E402
from perfmodel.models.number_formats import with_quantization  # noqa: E402
from perfmodel.models.params import weight_bytes  # noqa: E402
from perfmodel.models.weights.gguf import read_gguf  # noqa: E402
from perfmodel.specs import load_model  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.apply_linear import apply_linear  # noqa: E402
from perfmodel_executors.kernels.gguf_blocks import BLOCK_SIZES  # noqa: E402
from perfmodel_executors.kernels.weight_formats import (  # noqa: E402
    GgufWeight,
    RowsWeight,
    dequantize,
    quantize_gguf,
)
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder, load_decoder  # noqa: E402
from perfmodel_executors.models.loading import files  # noqa: E402

# Where a block has numbers in fp16 (ggml-common.h).
HALVES = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}


def random_weight(n=24, k=512):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, k, generator=generator) * torch.linspace(0, 3, n)[:, None] + 0.2


def packed_parts(decoder):
    """All matrices in blocks, by component."""
    weights, found = decoder.weights, {"embedding": [], "lm_head": [], "attention": [], "dense_ffn": []}
    found["embedding"].append(weights.embedding)
    if weights.lm_head is not weights.embedding:
        found["lm_head"].append(weights.lm_head)
    for layer in weights.layers:
        for each in (layer.mixer.qkv, layer.mixer.out):
            found["attention"] += each.parts if isinstance(each, RowsWeight) else [each]
        found["dense_ffn"] += [layer.ffn.up, layer.ffn.down]
    return found


def logits_of(decoder):
    tokens = torch.randint(decoder.model.vocab_size, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    return decoder.forward(build_batch([TokenSegment(tokens, 0, [0, 1, 2])], 4), decoder.new_cache(4, 8))


@pytest.mark.parametrize("form", BLOCK_SIZES)
def test_random_bytes_mean_what_the_gguf_package_says(form):
    gguf = pytest.importorskip("gguf", reason="compares with the package gguf")
    elements, size = BLOCK_SIZES[form]
    raw = np.random.default_rng(1).integers(0, 256, (7, 512 // elements, size), dtype=np.uint8)
    for place in HALVES.get(form, (0,)):
        raw[..., place + 1] &= 0xBB  # no exponent of infinities
    rows = raw.reshape(7, -1)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[form.upper()])
    actual = dequantize(GgufWeight(torch.from_numpy(rows), form))
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-6, atol=0)


def test_more_bits_are_rounded_less_and_q8_0_by_half_a_step():
    weight = random_weight()
    errors = {form: float((dequantize(quantize_gguf(weight, form)) - weight).norm()) for form in BLOCK_SIZES}
    for order in (("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0"), ("q4_0", "q5_0", "q8_0"), ("q4_1", "q5_1", "q8_0")):
        assert [errors[form] for form in order] == sorted((errors[form] for form in order), reverse=True)
    steps = weight.view(24, -1, 32).abs().amax(2).repeat_interleave(32, 1) / 127
    assert ((dequantize(quantize_gguf(weight, "q8_0")) - weight).abs() <= 0.51 * steps).all()


@pytest.mark.parametrize("form", BLOCK_SIZES)
def test_a_product_is_that_of_the_dequantised_weight_and_the_bytes_are_the_blocks(form, monkeypatch):
    """... also where a weight is multiplied in several tiles of rows, the last of them smaller."""
    from perfmodel_executors.kernels import linear as reference

    monkeypatch.setattr(reference, "_WEIGHTS_AT_ONCE", 5 * 512)
    stored = quantize_gguf(random_weight(), form)
    elements, size = BLOCK_SIZES[form]
    assert stored.blocks_NJ.nbytes == 24 * 512 // elements * size
    for dtype in (torch.float32, torch.bfloat16):
        x, bias = torch.randn(3, 512).to(dtype), torch.randn(24).to(dtype)
        expected = torch.nn.functional.linear(x, dequantize(stored).to(dtype), bias)
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.1}
        torch.testing.assert_close(apply_linear(load_kernels(), x, stored, bias), expected, **tolerance)


@pytest.mark.parametrize("form", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_file_stays_in_its_blocks_and_says_what_its_dequantised_weights_say(tmp_path, form, arch):
    """Bytes: as the file's own header counts them, component by component."""
    gguf = pytest.importorskip("gguf", reason="needs perfmodel[weights]")
    path = tmp_path / "tiny.gguf"
    write_gguf(random_decoder(tmp_path, model_type=arch), path, arch, gguf.GGMLQuantizationType[form])
    model = load_model(path)
    packed = load_decoder(model, FLOAT32)
    plain = load_decoder(model, FLOAT32.model_copy(update={"quantization": "none"}))
    assert all(isinstance(each, GgufWeight) for parts in packed_parts(packed).values() for each in parts)
    torch.testing.assert_close(logits_of(packed), logits_of(plain), rtol=1e-4, atol=1e-4)
    _, per_block, size = {"Q4_0": ("", 32, 18), "Q8_0": ("", 32, 34)}[form]
    matrices = {name: shape for name, (shape, _) in read_gguf(path).tensors.items() if len(shape) == 2}
    held = {name: sum(each.blocks_NJ.nbytes for each in parts) for name, parts in packed_parts(packed).items()}
    assert sum(held.values()) == sum(a * b * size // per_block for a, b in matrices.values())
    counted = weight_bytes(model)
    biases = 2 * 2 * 64 if arch == "qwen2" else 0  # counted with their matrix, stored in the model's dtype
    assert counted["attention"] == pytest.approx(held["attention"] + biases * size / per_block / 2)
    assert {name: counted[name] for name in ("embedding", "lm_head", "dense_ffn")} == pytest.approx(
        {name: held[name] for name in ("embedding", "lm_head", "dense_ffn")}
    )


@pytest.mark.parametrize("mix", ["q4_0", "q8_0", "q4_k_m", "q5_k_s", "q2_k", "q3_k_m"])
def test_random_weights_are_held_in_as_many_bytes_as_the_mix_has(mix):
    """Q4_K_M: values in Q6_K in the layers that llama.cpp gives more bits, tables of words in Q6_K."""
    layers = [(attention(head_dim=64, v_head_dim=64), DenseFFN(256)) for _ in range(3)]
    model = with_quantization(tiny(*layers, hidden_size=256), mix)
    decoder = Decoder(model, torch.float32, seed=1)
    held = {name: sum(each.blocks_NJ.nbytes for each in parts) for name, parts in packed_parts(decoder).items()}
    assert held == pytest.approx({name: weight_bytes(model)[name] for name in held})
    if mix == "q4_k_m":
        forms = [[part.form for part in getattr(x.mixer.qkv, "parts", [x.mixer.qkv])] for x in decoder.weights.layers]
        assert forms == [["q4_k"], ["q4_k"], ["q4_k", "q6_k"]]
    assert torch.isfinite(logits_of(decoder)).all()


def test_what_is_in_no_known_blocks_is_refused_with_the_way_out(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="needs perfmodel[weights]")
    write_gguf(random_decoder(tmp_path), tmp_path / "tiny.gguf", quantization=gguf.GGMLQuantizationType.Q5_1)
    model = load_model(tmp_path / "tiny.gguf")
    monkeypatch.setattr(files, "BLOCK_SIZES", {"q4_0": (32, 18)})
    with pytest.raises(SpecError, match=r"token_embd\.weight is in q5_1, .*; set engine\.quantization to none"):
        load_decoder(model, FLOAT32)
    dense = tiny((attention(), DenseFFN(64)))
    with pytest.raises(PerfmodelError, match=r"weights in iq4_xs are not executed yet.*q4_k_m"):
        Decoder(with_quantization(dense, "iq4_xs"))
    with pytest.raises(PerfmodelError, match="32 inputs has no whole blocks of 256, as q4_k has them"):
        Decoder(with_quantization(dense, "q4_k_s"))
    with pytest.raises(PerfmodelError, match=r"experts in llama\.cpp's blocks are not executed"):
        Decoder(with_quantization(tiny((attention(), MoEFFN(4, 2, 32))), "q4_0"))
