"""Parameter counts: derived by hand, published, and linear in the number of layers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.files.catalog import find_file
from perfmodel.models import (
    Attention,
    DenseFFN,
    Layer,
    ModelSpec,
    QuantizationSpec,
    count_parameters,
    layer_parameters,
    list_models,
    load_model,
    weight_bytes,
)
from perfmodel.models.cards import load_card


@pytest.mark.parametrize("name", list_models())
def test_every_card_has_the_published_number_of_parameters_within_one_per_cent(name: str) -> None:
    card = load_card(find_file("models", name))
    if card.source.startswith("ours"):
        assert card.published_params is None
        return
    assert card.published_params is not None
    assert card.published_params_note
    counted = float(count_parameters(load_model(name)).total)
    if card.published_covers == "decoder and vision":
        counted += card.extra_params
    assert counted == pytest.approx(card.published_params, rel=0.01)


def test_llama_2_7b_by_hand() -> None:
    """d = 4096, 32 layers, 32 heads of 128, f = 11008, V = 32000, nothing tied, no biases.

    attention  4 d^2                        = 67,108,864
    ffn        3 d f = 3 * 4096 * 11008     = 135,266,304
    norms      2 d                          = 8,192
    layer                                   = 202,383,360;  32 layers = 6,476,267,520
    embedding + head  2 V d                 = 262,144,000
    final norm                              = 4,096
    total                                   = 6,738,415,616
    """
    model = load_model("llama-2-7b")
    (layer, count), *others = model.layers
    assert not others
    assert count == 32
    assert layer_parameters(model, layer) == {"attention": 67_108_864, "dense_ffn": 135_266_304, "norms": 8_192}
    counted = count_parameters(model)
    assert counted.total == 6_738_415_616
    assert counted.active == 6_738_415_616 - 32000 * 4096  # all but the embedding table
    assert counted.embedding == counted.lm_head == 131_072_000


def test_llama_3_1_8b_by_hand() -> None:
    """d = 4096, 32 layers, 32 heads and 8 KV heads of 128, f = 14336, V = 128256.

    attention 2 d^2 + 2 d * 1024 = 41,943,040; ffn 3 d f = 176,160,768; norms 8,192: 218,112,000 a layer;
    32 layers 6,979,584,000 + 2 V d 1,050,673,152 + d 4,096 = 8,030,261,248.
    """
    assert count_parameters(load_model("llama-3.1-8b")).total == 8_030_261_248


def test_llama_3_1_70b_by_hand() -> None:
    """d = 8192, 80 layers, 64 heads and 8 KV heads of 128, f = 28672, V = 128256.

    attention 2 d^2 + 2 d * 1024 = 150,994,944; ffn 3 d f = 704,643,072; norms 16,384: 855,654,400 a layer;
    80 layers 68,452,352,000 + 2 V d 2,101,346,304 + d 8,192 = 70,553,706,496.
    """
    assert count_parameters(load_model("llama-3.1-70b")).total == 70_553_706_496


def test_mixtral_8x7b_by_hand() -> None:
    """d = 4096, 32 layers, 8 experts of f = 14336, 2 per token, V = 32000.

    attention 41,943,040; one expert 3 d f = 176,160,768; router 8 d = 32,768; norms 8,192.
    layer 41,943,040 + 8 * 176,160,768 + 32,768 + 8,192 = 1,451,270,144; 32 layers 46,440,644,608
    + 2 V d 262,144,000 + d 4,096 = 46,702,792,704.
    active: 6 of 8 experts fewer, and no embedding: - 32 * 6 * 176,160,768 - 131,072,000 = 12,748,853,248.
    """
    counted = count_parameters(load_model("mixtral-8x7b"))
    assert counted.total == 46_702_792_704
    assert counted.active == 12_748_853_248


def test_deepseek_v3_by_hand() -> None:
    """d = 7168, 61 layers (3 dense), MLA with 128 heads, 256 experts of 2048 and a shared one, V = 129280.

    MLA   q_a 7168*1536 + q_b 1536*128*192 + kv_a 7168*576 + kv_b 512*128*256 + o 128*128*7168
          = 11,010,048 + 37,748,736 + 4,128,768 + 16,777,216 + 117,440,512 = 187,105,280
    norms 2*7168 + 1536 + 512 = 16,384
    dense 3*7168*18432 = 396,361,728
    MoE   router 7168*256 + 256 = 1,835,264; one expert 3*7168*2048 = 44,040,192; 257 of them 11,318,329,344
    total 61*(187,105,280 + 16,384) + 3*396,361,728 + 58*(1,835,264 + 11,318,329,344) + 2*129280*7168 + 7168
          = 11,414,421,504 + 1,189,085,184 + 656,569,547,264 + 1,853,358,080 + 7,168 = 671,026,419,200
    (the published 671.03e9; the prediction layer of the checkpoint is not counted).
    active: 248 of 256 experts fewer in 58 layers, and no embedding.
    """
    counted = count_parameters(load_model("deepseek-v3"))
    assert counted.total == 671_026_419_200
    assert counted.active == 671_026_419_200 - 58 * 248 * 44_040_192 - 129280 * 7168
    assert counted.active == pytest.approx(37e9, rel=0.015)  # the report's figure


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("gpt-oss-120b", 5.13e9),
        ("gpt-oss-20b", 3.61e9),
        ("qwen3-235b-a22b", 22e9),
        ("qwen3-coder-480b-a35b", 35e9),
        ("deepseek-v2-lite", 2.4e9),
        ("kimi-k2", 32e9),
        ("llama-4-scout", 17e9),
        ("llama-4-maverick", 17e9),
        ("mimo-v2-flash", 15e9),
        ("glm-5", 40e9),
        ("minimax-m2.5", 10e9),
        ("nemotron-3-nano-30b-a3b", 3.2e9),
        ("nemotron-3-super-120b-a12b-fp8", 12.1e9),
        ("qwen3.5-397b-a17b", 17e9),
        ("mixtral-8x22b", 39e9),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, active: float) -> None:
    """Published to two digits, some with the embedding and some without: 6 %."""
    assert count_parameters(load_model(name)).active == pytest.approx(active, rel=0.06)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gpt-oss-120b", 65.25),  # sizes of the repositories' safetensors files
        ("gpt-oss-20b", 13.76),
        ("kimi-k2.5", 595.0),
        ("llama-2-7b", 13.48),
        ("qwen3-30b-a3b-fp8", 31.2),
    ],
)
def test_weight_bytes_are_the_size_of_the_published_files(name: str, gigabytes: float) -> None:
    assert sum(weight_bytes(load_model(name)).values()) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_weight_bytes_keep_what_the_quantization_keeps() -> None:
    model = load_model("tiny-llama")
    stored = count_parameters(model).stored
    quantized = replace(
        model, quantization=QuantizationSpec("awq", "int4", None, 128, kept=frozenset({"embedding", "lm_head"}))
    )
    sizes = weight_bytes(quantized)
    assert sizes["embedding"] == 2 * stored["embedding"]
    assert sizes["norms"] == 2 * stored["norms"]
    assert sizes["dense_ffn"] == pytest.approx(stored["dense_ffn"] * (4 + 16 / 128) / 8)


def test_a_tied_head_is_stored_once_and_used_by_every_token() -> None:
    counted = count_parameters(load_model("qwen3-0.6b"))
    assert counted.lm_head == 0
    assert counted.active == counted.total


@given(
    num_layers=st.integers(1, 200),
    factor=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 80, 128]),
    intermediate=st.integers(1, 30000),
    gated=st.booleans(),
)
def test_layer_parameters_grow_linearly_with_layers(
    num_layers: int, factor: int, kv_heads: int, head_dim: int, intermediate: int, gated: bool
) -> None:
    layer = Layer(Attention(8, kv_heads, head_dim, head_dim), DenseFFN(intermediate, gated))
    model = ModelSpec("x", "llama", 512, 1000, 4096, ((layer, num_layers),))
    fixed = 2 * 1000 * 512 + 512
    longer = replace(model, layers=((layer, factor * num_layers),))
    assert count_parameters(longer).total - fixed == factor * (count_parameters(model).total - fixed)
    assert count_parameters(model).total - fixed == num_layers * sum(layer_parameters(model, layer).values())


def test_the_count_prints_as_a_table() -> None:
    text = str(count_parameters(load_model("mixtral-8x7b")))
    assert "experts" in text
    assert "46,702,792,704" in text
