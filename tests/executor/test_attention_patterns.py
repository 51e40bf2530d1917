"""Windows with sinks, blocks and standard attention against their definitions without a cache. fp32."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
functional = torch.nn.functional

from executor_models import MODELS, attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import BlockSparsity, DenseFFN  # noqa: E402
from perfmodel.models.changes import with_window  # noqa: E402
from perfmodel.models.model_changes import ModelChanges  # noqa: E402
from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel_executors.graphs import DecodeGraphs  # noqa: E402
from perfmodel_executors.kernels.attention_sparse import seen_blocks  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, TreeNodes, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.models.support import check_capturable  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402

BLOCK = 4
LENGTH = 45
SIZES = [(45,), (1,) * 45, (7, 1, 1, 13, 8, 1, 14), (16, 29), (3, 1, 41)]


def rotated(x, positions):
    """RoPE of [L, heads, dim], by complex multiplication."""
    half = x.shape[-1] // 2
    angle = torch.outer(
        torch.as_tensor(positions).float(), MODELS["gqa"].ropes[0].theta ** (-torch.arange(half) / half)
    )
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((z.real, z.imag), -1)


def dense_logits(decoder, tokens, seen):
    """All positions' logits; `seen(position, mixer)` lists the keys of a query and their positions for its rotation."""
    spec, x = decoder.model, decoder.weights.embedding[torch.tensor(tokens)]

    def rms(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.norm_eps) * weight

    for layer, weights in zip(spec.iter_layers(), decoder.weights.layers, strict=True):
        mixer, h = layer.mixer, rms(x, weights.mixer_norm)
        sizes = [mixer.num_heads * 8, mixer.num_kv_heads * 8, mixer.num_kv_heads * 8]
        q, k, v = (part.view(len(x), -1, 8) for part in (h @ weights.mixer.qkv.T).split(sizes, -1))
        group = mixer.num_heads // mixer.num_kv_heads
        rows = []
        for p in range(len(x)):
            keys, places = seen(p, mixer)
            query = rotated(q[p : p + 1], places[-1:])[0]
            key = rotated(k[keys], places).repeat_interleave(group, 1)
            scores = torch.einsum("nh,jnh->nj", query, key) / math.sqrt(8)
            rows.append(torch.einsum("nj,jnh->nh", scores.softmax(-1), v[keys].repeat_interleave(group, 1)).flatten())
        x = x + torch.stack(rows) @ weights.mixer.out.T
        gate, up = (rms(x, weights.ffn_norm) @ weights.ffn.up.T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ weights.ffn.down.T
    return rms(x, decoder.weights.final_norm) @ decoder.weights.lm_head.T


def streaming(position, mixer):
    """StreamingLLM's cache: the sinks and the last `window`, rotated by where they stand in it."""
    keys = [j for j in range(position + 1) if j < mixer.num_sink_tokens or j > position - (mixer.window or 10**9)]
    return keys, list(range(len(keys)))


def in_blocks(position, mixer):
    size = mixer.sparsity.block
    blocks = seen_blocks(position // size, mixer.sparsity)
    keys = [j for j in range(position + 1) if j // size in blocks]
    return keys, keys


def chunked_logits(decoder, tokens, sizes, table):
    cache, out, done = decoder.new_cache(BLOCK, 14), [], 0
    for size in sizes:
        batch = build_batch([TokenSegment(tokens[done : done + size], done, table)], BLOCK, ring=decoder.ring)
        out.append(decoder.forward(batch, cache)[0])
        done += size
    return torch.stack(out)


def tokens_of(seed, count=LENGTH):
    return torch.randint(101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def windowed(window, sinks, every=1, **changes):
    model = with_window(MODELS["gqa"], ModelChanges(window=window, sinks=sinks, window_every=every))
    return Decoder(replace(model, **changes), torch.float32, seed=1)


def check_chunkings(decoder, seen, num_blocks, sizes):
    tokens, table = tokens_of(2), [9, 2, 5, 0, 7, 1, 11, 3, 4, 13, 6, 8][:num_blocks]
    expected = dense_logits(decoder, tokens, seen)[torch.tensor(sizes).cumsum(0) - 1]
    torch.testing.assert_close(chunked_logits(decoder, tokens, sizes, table), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("window", "sinks"), [(9, 0), (9, 3), (6, 5), (40, 2)])
def test_a_rolling_cache_is_streaming_attention_in_so_few_blocks(window, sinks, sizes):
    check_chunkings(windowed(window, sinks), streaming, -(-(window + sinks) // BLOCK), sizes)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("window", "sinks"), [(9, 0), (9, 3), (6, 5)])
def test_windowed_layers_beside_others_keep_whole_sequences(window, sinks, sizes):
    check_chunkings(windowed(window, sinks, every=2), streaming, 12, sizes)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "sparsity",
    [BlockSparsity(4, 5, None, 1, 2), BlockSparsity(8, 3, None, 1, 0), BlockSparsity(4, None, 0.4, 1, 3)],
    ids=["bigbird", "longformer", "fraction"],
)
def test_block_sparse_attention_is_its_pattern(sparsity, sizes):
    layer = (attention(sparsity=sparsity), DenseFFN(48))
    check_chunkings(Decoder(tiny(layer, layer), torch.float32, seed=1), in_blocks, 12, sizes)


@pytest.mark.parametrize("sizes", SIZES)
def test_standard_attention_sees_all_keys(sizes):
    decoder = Decoder(MODELS["gqa"], torch.float32, seed=1, attention="standard")
    check_chunkings(decoder, lambda p, _: (list(range(p + 1)),) * 2, 12, sizes)


def test_standard_attention_runs_the_kernel_that_stores_scores(monkeypatch):
    called = []
    decoder = Decoder(MODELS["gqa"], torch.float32, seed=1, attention="standard")
    kernel = decoder.kernels.attention_standard
    monkeypatch.setattr(decoder.kernels, "attention_standard", lambda *a: called.append(len(a[0])) or kernel(*a))
    segments = [TokenSegment(tokens_of(1, 6), 0, [0, 1]), TokenSegment([3], 0, [2])]
    decoder.forward(build_batch(segments, BLOCK), decoder.new_cache(BLOCK, 3))
    assert called == [1, 6] * 2


@pytest.mark.parametrize("block", [0, 1, 6, 7, 30])
def test_a_pattern_has_its_blocks_the_own_one_last(block):
    bigbird = seen_blocks(block, BlockSparsity(64, 8, None, 2, 3))
    assert len(bigbird) == len(set(bigbird)) == min(block + 1, 8)
    assert list(bigbird) == sorted(bigbird)
    assert bigbird[-1] == block
    assert {0, min(block, 1), max(0, block - 2)} <= set(bigbird)
    assert len(seen_blocks(block, BlockSparsity(64, None, 0.25, 2, 3))) == math.ceil((block + 1) / 4)


def test_a_warm_up_leaves_a_rolling_cache_as_it_was():
    decoder, tokens = windowed(9, 3), tokens_of(4, 30)
    runs = []
    for warms_up in (False, True):
        runner = StepRunner(decoder, decoder.new_cache(BLOCK, 6))
        runner.run([TokenSegment(tokens[:10], 0, [4, 1, 2])])
        if warms_up:
            runner.run([TokenSegment(tokens[10:], 10, [4, 1, 2])], is_warm_up=True)
        runner.run([TokenSegment(tokens[10:], 10, [4, 1, 2])])
        runs.append(runner.cache.pages[1].k_BSKH)
    assert torch.equal(*runs)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantised_rolling_cache_reads_a_chunk_as_it_stores_it(dtype):
    model = windowed(9, 3).model
    decoder = Decoder(replace(model, quantization=replace(model.quantization, kv_cache=dtype)), torch.float32, seed=1)
    tokens, table = tokens_of(2), [1, 0, 2]
    one_by_one, at_once = (chunked_logits(decoder, tokens, sizes, table)[-1] for sizes in ((1,) * 45, (45,)))
    torch.testing.assert_close(one_by_one, at_once, rtol=1e-3, atol=1e-3)


def test_a_rolling_cache_is_decoded_by_graphs_and_eagerly_alike():
    """Two sequences beyond the ring, in a graph of four."""
    decoder, tables, texts = windowed(9, 3), ([4, 0, 2], [1, 5, 3]), ([], [])
    caches = [decoder.new_cache(BLOCK, 8) for _ in texts]
    graphs = DecodeGraphs(decoder, caches[0], 7, 3, 64)
    for cache, text, run in zip(caches, texts, (graphs.run, None), strict=True):
        lengths, new = [10, 5], [tokens_of(1, 10), tokens_of(2, 5)]
        for step in range(12):
            computed = [0, 0] if not step else [length + step - 1 for length in lengths]
            segments = [TokenSegment(*each) for each in zip(new, computed, tables, strict=True)]
            with torch.inference_mode():
                if step and run is not None:
                    tokens = run(segments)
                else:
                    tokens = decoder.step(build_batch(segments, BLOCK, ring=decoder.ring), cache)
            new = [[token] for token in tokens]
            text.append(tokens)
    assert texts[0] == texts[1]


def test_drafted_tokens_are_not_verified_where_keys_are_overwritten_or_limited():
    rolling, standard = windowed(9, 3), Decoder(MODELS["gqa"], torch.float32, attention="standard")
    with pytest.raises(PerfmodelError, match=r"not verified in a rolling KV cache.*leave out the window"):
        build_batch([TokenSegment([1, 2], 8, [0, 1, 2], is_verified=True)], BLOCK, ring=rolling.ring)
    tree = build_batch([TokenSegment([1, 2], 8, [0, 1, 2], nodes=TreeNodes(0, (0, 0), (1, 2)))], BLOCK)
    with pytest.raises(PerfmodelError, match="not verified with standard attention; draft a chain"):
        standard.forward(tree, standard.new_cache(BLOCK, 3))


def test_what_does_not_fit_together_is_refused():
    sparse = tiny((attention(sparsity=BlockSparsity(6, 3)), DenseFFN(8)))
    with pytest.raises(PerfmodelError, match=r"sparse\.block=6 is not a multiple of engine\.block_size=4"):
        Decoder(sparse).new_cache(BLOCK)
    with pytest.raises(PerfmodelError, match=r"standard attention is executed over all keys only.*to flash"):
        Decoder(sparse, attention="standard")
    with pytest.raises(PerfmodelError, match=r"CUDA graphs cannot hold; set engine\.enforce_eager"):
        check_capturable(MODELS["gqa"], "standard")
    for model in (MODELS["gqa"], windowed(9, 3).model):
        check_capturable(model, EngineSpec().attention)
    with pytest.raises(PerfmodelError, match="decode_context_parallel_size"):
        check_capturable(MODELS["gqa"], "flash", num_stripes=2)
