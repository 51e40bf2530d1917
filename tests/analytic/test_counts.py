"""FLOPs and bytes of whole models, derived by hand. A multiply-add is two FLOPs."""

import pytest

from perfmodel.cost.memory.footprint import kv_bytes_per_token
from perfmodel.models.cards import list_models, load_model
from perfmodel.models.params import count_parameters
from perfmodel.ops import BatchShape, Sharding, build_graph, decode_shape
from perfmodel.specs.engine.spec import EngineSpec

MATRIX = ("gemm", "moe")
ATTENTION = ("attention_prefill", "attention_decode")


def flops(name, shape, families, **engine):
    graph = build_graph(load_model(name), EngineSpec(**engine))
    works = [(node.count, node.work(shape)) for node in graph.nodes]
    return sum(count * work.flops for count, work in works if work.family in families)


def kv_bytes(name, tp=1):
    model = load_model(name)
    return kv_bytes_per_token(model, Sharding(tp=tp), list(model.iter_layers()))


def test_llama_2_7b():
    """d = 4096, 32 layers, 32 heads of 128 (MHA), ff = 11008, V = 32000.

    Matrices of a layer: q, k, v, o 4 d^2 = 67,108,864; gate, up, down 3 d ff = 135,266,304; together 202,375,168.
    One token: 2 x (32 x 202,375,168 + V d = 131,072,000) = 13,214,154,752 FLOPs.
    Attention: q k and p v 2 x 2 x d per visible token and layer: 4 x 4096 x 32 = 524,288 FLOPs.
    KV: k and v 2 x 4096 x 2 B x 32 layers = 524,288 B per token.
    """
    assert flops("llama-2-7b", decode_shape(1, 1), MATRIX) == 13_214_154_752
    assert flops("llama-2-7b", decode_shape(1, 1000), ATTENTION) == 524_288 * 1000
    assert kv_bytes("llama-2-7b") == 524_288


def test_llama_2_7b_prefill():
    """A prompt of 2048: matrices 2048 x 2 x 32 x 202,375,168, LM head for one row, 2048 x 2049 / 2 causal pairs."""
    shape = BatchShape(2048, 1, ((2048, 0),))
    layers = 2048 * 2 * 32 * 202_375_168
    assert flops("llama-2-7b", shape, MATRIX) == layers + 2 * 32000 * 4096
    assert flops("llama-2-7b", shape, ATTENTION) == 524_288 * 2048 * 2049 // 2


def test_llama_3_1_70b():
    """d = 8192, 80 layers, 64 heads and 8 KV heads of 128, ff = 28672, V = 128256.

    Layer: q and o 2 d^2 = 134,217,728; k and v d x 2 x 1024 = 16,777,216; 3 d ff = 704,643,072; sum 855,638,016.
    One token: 2 x (80 x 855,638,016 + V d = 1,050,673,152) = 139,003,428,864 FLOPs.
    Attention: 4 x 8192 x 80 = 2,621,440 per visible token. KV: 2 x 8 x 128 x 2 B x 80 = 327,680 B.
    """
    assert flops("llama-3.1-70b", decode_shape(1, 1), MATRIX) == 139_003_428_864
    assert flops("llama-3.1-70b", decode_shape(3, 500), ATTENTION) == 2_621_440 * 1500
    assert kv_bytes("llama-3.1-70b") == 327_680
    assert kv_bytes("llama-3.1-70b", tp=8) == 327_680 / 8
    assert kv_bytes("llama-3.1-70b", tp=16) == 327_680 / 8  # 8 KV heads: ranks beyond 8 hold copies


def test_mixtral_8x7b():
    """d = 4096, 32 layers, 32 heads and 8 KV heads of 128, 8 experts of ff = 14336, 2 per token, V = 32000.

    Layer: q and o 2 d^2 = 33,554,432; k and v d x 2048 = 8,388,608; router 8 d = 32,768;
    two experts 2 x 3 d ff = 352,321,536; sum 394,297,344.
    One token: 2 x (32 x 394,297,344 + V d = 131,072,000) = 25,497,174,016 FLOPs.
    KV: 2 x 8 x 128 x 2 B x 32 = 131,072 B.
    Weights read by the experts of n tokens: D = 8 (1 - 0.75^n) experts of 3 d ff x 2 B = 352,321,536 B in 32 layers.
    """
    assert flops("mixtral-8x7b", decode_shape(1, 1), MATRIX) == 25_497_174_016
    assert kv_bytes("mixtral-8x7b") == 131_072
    graph = build_graph(load_model("mixtral-8x7b"))
    node = next(node for node in graph.nodes if node.name == "experts")
    for num_tokens, distinct in ((1, 2.0), (2, 3.5), (4, 8 * (1 - 0.75**4))):
        work = node.work(decode_shape(num_tokens, 1))
        assert node.count * work.weight_bytes == pytest.approx(32 * distinct * 352_321_536)


def test_deepseek_v3():
    """d = 7168, 61 layers (3 dense of ff = 18432), 128 heads, ranks 1536 and 512, head sizes 128 + 64 and 128,
    256 experts of 2048, 8 per token, one shared; V = 129280.

    MLA: q_a d x 1536 = 11,010,048; q_b 1536 x 128 x 192 = 37,748,736; kv_a d x 576 = 4,128,768;
         kv_b 512 x 128 x 256 = 16,777,216 (expanded, or absorbed into q and out: as many); o 128 x 128 d = 117,440,512;
         sum 187,105,280; times 61 = 11,413,422,080.
    Dense: 3 d 18432 = 396,361,728; times 3 = 1,189,085,184.
    MoE: router 256 d = 1,835,008; 9 experts of 3 d 2048 = 44,040,192: 396,361,728; sum 398,196,736; times 58.
    Head: 926,679,040. One token: 2 x 36,624,596,992 = 73,249,193,984 FLOPs.
    Absorbed attention: 2 x 128 x (512 + 64 + 512) = 278,528 per visible token and layer.
    KV: (512 + 64) x 2 B x 61 = 70,272 B, on every rank.
    """
    matrices = 2 * (11_413_422_080 + 1_189_085_184 + 58 * 398_196_736 + 926_679_040)
    assert matrices == 73_249_193_984
    assert flops("deepseek-v3", decode_shape(1, 1), MATRIX) == matrices
    assert flops("deepseek-v3", decode_shape(2, 1000), ATTENTION) == 278_528 * 61 * 2000
    assert kv_bytes("deepseek-v3") == kv_bytes("deepseek-v3", tp=8) == 70_272


@pytest.mark.parametrize("name", list_models())
def test_matrix_flops_per_token_are_twice_the_active_parameters(name):
    """Every active weight is multiplied once; what is no matrix (norms, biases, A and D of a scan) is below 0.3 %."""
    model = load_model(name)
    shape = decode_shape(1, 1, model.attention_spans)
    assert flops(name, shape, MATRIX) == pytest.approx(2 * count_parameters(model).active, rel=0.003)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "nemotron-3-nano-30b-a3b"])
def test_a_prompt_of_one_token_costs_what_a_decode_costs(name):
    model = load_model(name)
    as_prefill = BatchShape(1, 1, ((1, 0),), decode_windowed=(0,) * len(model.attention_spans))
    assert flops(name, as_prefill, MATRIX) == flops(name, decode_shape(1, 1, model.attention_spans), MATRIX)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "llama-4-scout"])
def test_chunked_prefill_does_the_flops_of_the_whole(name):
    spans = (0,) * len(load_model(name).attention_spans)
    whole = BatchShape(9000, 1, ((9000, 0),), decode_windowed=spans)
    chunks = [BatchShape(1500, 0, ((1500, 1500 * i),), decode_windowed=spans) for i in range(6)]
    assert sum(flops(name, chunk, ATTENTION) for chunk in chunks) == flops(name, whole, ATTENTION)
