"""Parameter counts: derived by hand, published, and linear in the number of layers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.files.catalog import find_file
from perfmodel.models import list_models, load_model
from perfmodel.models.architecture import (
    Attention,
    DenseFFN,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    LinearAttention,
    Mamba,
    Mixer,
    MoEFFN,
    QuantizationSpec,
)
from perfmodel.models.cards import load_card
from perfmodel.models.params import count_parameters, layer_parameters, weight_bytes
from perfmodel.models.spec import ModelSpec


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


def test_gpt_oss_20b_by_hand() -> None:
    """d = 2880, 24 layers, 64 heads and 8 KV heads of 64 with biases and a sink a head, 32 experts of 2880, V = 201088.

    attention 2880 * (4096 + 2 * 512) + 4096 * 2880, biases 4096 + 1024 + 2880, sinks 64      = 26,550,144
    experts   32 * (3 * 2880^2 + 3 * 2880) = 796,538,880; router 32 * 2880 + 32 = 92,192; norms 5,760
    total     24 * 823,186,976 + 2 V d + d = 20,914,757,184, as in the checkpoint's header.
    """
    assert count_parameters(load_model("gpt-oss-20b")).total == 20_914_757_184


def test_parameters_of_an_indexer() -> None:
    """DeepSeek-V3.2 adds to V3, in 61 layers, 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128."""
    added = count_parameters(load_model("deepseek-v3.2")).total - count_parameters(load_model("deepseek-v3")).total
    assert added == 61 * (12_582_912 + 917_504 + 458_752 + 256)


@pytest.mark.parametrize(
    ("mixer", "weights", "norms"),
    [
        # d = 512. q 512 * 4 * 64, k and v 512 * 2 * 64 each, o 4 * 64 * 512; norms over 4 + 2 heads of 64, or one of 64
        (Attention(4, 2, 64, 64, qk_norm=True, qk_norm_width="all_heads"), 393_216, 6 * 64),
        (Attention(4, 2, 64, 64, qk_norm=True), 393_216, 2 * 64),
        # the gate is as wide as the output: 512 * 4 * 32 more; keys of 64, values of 32
        (Attention(4, 2, 64, 32, output_gate=True), 512 * (256 + 128 + 128 + 64) + 128 * 512, 0),
        # q, k of 2 * 16, v, z of 4 * 32: 512 * 320; a, b 512 * 8; 4 taps of 2 * 32 + 128; A, dt 8; o 128 * 512
        (GatedDeltaNet(2, 4, 16, 32, 4), 163_840 + 4_096 + 768 + 8 + 65_536, 32),
        # Mamba-2: z, x of 8 * 16, B, C of 2 * 32, dt 8: 512 * 392; 256 channels of 4 taps and a bias; A, D, dt; o
        (Mamba(8, 16, 32, 2, 4), 200_704 + 1_280 + 24 + 65_536, 128),
        # Mamba-1, 96 channels: 512 * 192; 96 * 5; x 96 * (8 + 32); dt 8 * 96 + 96; A 96 * 16; D 96; o 96 * 512
        (Mamba(96, 1, 16, 1, 4, dt_rank=8), 98_304 + 480 + 3_840 + 864 + 1_536 + 96 + 49_152, 8 + 2 * 16),
        # q_a, q_b 512 * 48 + 48 * 4 * 24; kv_a 512 * (32 + 8); kv_b 32 * 4 * (16 + 12); o 4 * 12 * 512
        (LatentAttention(4, 48, 32, 16, 8, 12), 24_576 + 4_608 + 20_480 + 3_584 + 24_576, 48 + 32),
        # a Performer's 16 random features of 64, per KV head; Linformer's 16 x 16
        (LinearAttention("performer", 16, 4, 2, 64, 64), 393_216 + 2 * 16 * 64, 0),
        (LinearAttention("linformer", 16, 4, 2, 64, 64), 393_216 + 2 * 16 * 16, 0),
    ],
)
def test_mixers_by_hand(mixer: Mixer, weights: int, norms: int) -> None:
    """Head counts, sizes and widths differ, so that none can replace another. One norm of 512 precedes the mixer."""
    counted = layer_parameters(ModelSpec("x", "llama", 512, 1000, 4096, ()), Layer(mixer, None))
    assert counted.pop("norms") == 512 + norms
    assert list(counted.values()) == [weights]


@pytest.mark.parametrize(
    ("ffn", "counts"),
    [
        (DenseFFN(96), {"dense_ffn": 3 * 64 * 96}),
        (DenseFFN(96, gated=False, bias=True), {"dense_ffn": 2 * 64 * 96 + 96 + 64}),
        (DenseFFN(96, up_rank=8, down_rank=4), {"dense_ffn": 8 * (64 + 192) + 4 * (96 + 64)}),
        (
            MoEFFN(6, 2, 40, 24, shared_gate=True, router_bias=True),
            {"router": 64 * 6 + 6, "experts": 6 * 3 * 64 * 40, "shared_experts": 3 * 64 * 24 + 64},
        ),
        # experts in a latent space of 16 with projections in and out
        (MoEFFN(6, 2, 40, latent_size=16), {"router": 384, "experts": 6 * 3 * 16 * 40, "shared_experts": 2 * 64 * 16}),
    ],
)
def test_feed_forward_blocks_by_hand(ffn: FeedForward, counts: dict[str, int]) -> None:
    model = ModelSpec("x", "llama", 64, 1000, 4096, ((Layer(None, ffn), 3),))
    assert layer_parameters(model, Layer(None, ffn)) == counts | {"norms": 64}
    active = count_parameters(model).active_by_component
    assert active.get("experts", 0) == 3 * counts.get("experts", 0) * 2 // 6


@pytest.mark.parametrize(
    ("fields", "norms"),
    [({}, 2), ({"post_norms": True}, 4), ({"shared_block_norm": True}, 1), ({"norm_bias": True}, 4)],
)
def test_norms_of_a_layer_by_hand(fields: dict[str, Any], norms: int) -> None:
    layer = Layer(Attention(4, 2, 64, 64), DenseFFN(96))
    model = ModelSpec("x", "llama", 512, 1000, 4096, ((layer, 1),), **fields)
    assert layer_parameters(model, layer)["norms"] == norms * 512


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
