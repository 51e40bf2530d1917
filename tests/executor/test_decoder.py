"""The paged decoder against a dense one, and against itself under other chunkings. fp32, tight tolerance."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
functional = torch.nn.functional

from executor_models import MODELS, attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN, Layer, Mamba, MoEFFN  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402

BLOCK = 4


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + MODELS["gqa"].norm_eps) * weight


def rotate(x):
    """RoPE of [T, heads, dim] at positions 0..T-1, by complex multiplication."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(len(x)), MODELS["gqa"].ropes[0].theta ** (-torch.arange(half) / half)).to(x.dtype)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((z.real, z.imag), -1)


def dense_attention(mixer, weights, x):
    t = len(x)
    qkv = functional.linear(x, weights.qkv, weights.qkv_bias)
    n, k = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    kv = mixer.num_kv_heads * mixer.v_head_dim
    q, key, value = (
        part.view(t, -1, dim)
        for part, dim in zip(
            (qkv[:, :n], qkv[:, n : n + k], qkv[:, n + k : n + k + kv]),
            (mixer.head_dim, mixer.head_dim, mixer.v_head_dim),
            strict=True,
        )
    )
    if weights.q_norm is not None:
        q, key = rms(q, weights.q_norm), rms(key, weights.k_norm)
    if mixer.rope is not None:
        q, key = rotate(q), rotate(key)
    i, j = torch.arange(t)[:, None], torch.arange(t)[None]
    mask = j <= i
    if mixer.window is not None:
        mask &= i - j < mixer.window
    if mixer.chunk is not None:
        mask &= i // mixer.chunk == j // mixer.chunk
    group = mixer.num_heads // mixer.num_kv_heads
    scores = torch.einsum("inh,jnh->nij", q, key.repeat_interleave(group, 1)) / math.sqrt(mixer.head_dim)
    probabilities = scores.masked_fill(~mask, -math.inf).softmax(-1)
    out = torch.einsum("nij,jnh->inh", probabilities, value.repeat_interleave(group, 1)).flatten(1)
    if mixer.output_gate:
        out = out * torch.sigmoid(qkv[:, n + k + kv :])
    return functional.linear(out, weights.out, weights.out_bias)


def dense_block(ffn, weights, x):
    act = {"silu": functional.silu, "gelu": functional.gelu}[ffn.activation]
    h = functional.linear(x, weights.up, weights.up_bias)
    h = act(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :] if ffn.gated else act(h)
    return functional.linear(h, weights.down, weights.down_bias)


def token_by_token_experts(ffn, weights, x):
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        top, chosen = torch.softmax(weights.router @ row, -1).topk(ffn.top_k)
        for p, e in zip(top / top.sum(), chosen, strict=True):
            gate, up = (weights.up[e] @ row).chunk(2)
            out[t] += p * (weights.down[e] @ (functional.silu(gate) * up))
    if weights.shared is not None:
        shared = dense_block(DenseFFN(1, activation=ffn.activation, gated=ffn.gated), weights.shared, x)
        out += shared * torch.sigmoid(x @ weights.shared_gate.T)
    return out


def dense_logits(decoder, tokens):
    """All positions' logits without a cache."""
    x = decoder.weights.embedding[torch.tensor(tokens)]
    for layer, weights in zip(decoder.model.iter_layers(), decoder.weights.layers, strict=True):
        x = x + dense_attention(layer.mixer, weights.mixer, rms(x, weights.mixer_norm))
        block = token_by_token_experts if isinstance(layer.ffn, MoEFFN) else dense_block
        x = x + block(layer.ffn, weights.ffn, rms(x, weights.ffn_norm))
    return rms(x, decoder.weights.final_norm) @ decoder.weights.lm_head.T


def run(decoder, cache, segments):
    return decoder.forward(build_batch(segments, BLOCK), cache)


def chunked_logits(decoder, tokens, sizes, table, cache):
    """Logits after each chunk of `tokens`, cut into `sizes`."""
    out, done = [], 0
    for size in sizes:
        out.append(run(decoder, cache, [TokenSegment(tokens[done : done + size], done, table)])[0])
        done += size
    return torch.stack(out)


@pytest.fixture(params=sorted(MODELS))
def decoder(request):
    return Decoder(MODELS[request.param], torch.float32, seed=1)


@pytest.mark.parametrize("sizes", [(30,), (1,) * 30, (7, 1, 1, 13, 8), (16, 14), (3, 27)])
def test_paged_and_chunked_equals_dense(decoder, sizes):
    tokens = torch.randint(101, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    ends = torch.tensor(sizes).cumsum(0) - 1
    expected = dense_logits(decoder, tokens)[ends]
    actual = chunked_logits(decoder, tokens, sizes, [9, 2, 5, 0, 7, 1, 11, 3], decoder.new_cache(BLOCK, 12))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_mixed_batch_equals_each_sequence_alone(decoder):
    generator = torch.Generator().manual_seed(3)
    a, b, c = (torch.randint(101, (n,), generator=generator).tolist() for n in (12, 21, 6))
    tables = ([0, 1, 2], [3, 4, 5, 6, 7, 8], [9, 10])
    cache = decoder.new_cache(BLOCK, 11)
    chunked_logits(decoder, a, (11,), tables[0], cache)
    chunked_logits(decoder, b, (8,), tables[1], cache)
    # In one step: a chunk of b, the last token of a (a decode), the whole of c (not sampled), then b's last in order.
    logits = run(
        decoder,
        cache,
        [
            TokenSegment(b[8:], 8, tables[1]),
            TokenSegment(a[11:], 11, tables[0]),
            TokenSegment(c, 0, tables[2], is_sampled=False),
        ],
    )
    expected = torch.stack([dense_logits(decoder, tokens)[-1] for tokens in (b, a)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_shared_prefix_block_serves_both_sequences_even_within_one_step(decoder):
    tokens = torch.randint(101, (16,), generator=torch.Generator().manual_seed(4)).tolist()
    other = [*tokens[:8], 5, 6, 7]
    cache = decoder.new_cache(BLOCK, 8)
    # The second sequence reads blocks 3 and 1 that the first writes in the same step.
    logits = run(decoder, cache, [TokenSegment(tokens, 0, [3, 1, 0, 2]), TokenSegment(other[8:], 8, [3, 1, 7])])
    expected = torch.stack([dense_logits(decoder, sequence)[-1] for sequence in (tokens, other)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_cache_keeps_its_contents_when_it_grows(decoder):
    tokens = torch.randint(101, (9,), generator=torch.Generator().manual_seed(5)).tolist()
    cache = decoder.new_cache(BLOCK, 1)
    run(decoder, cache, [TokenSegment(tokens[:4], 0, [0])])
    cache.reserve_for([[0, 200, 100]])
    assert cache.num_blocks > 200
    logits = run(decoder, cache, [TokenSegment(tokens[4:], 4, [0, 200, 100])])
    torch.testing.assert_close(logits[0], dense_logits(decoder, tokens)[-1], rtol=1e-4, atol=1e-4)


def test_weights_are_equal_for_equal_seeds_and_logits_finite_in_bf16():
    first, second = (Decoder(MODELS["moe"], torch.bfloat16, seed=7) for _ in range(2))
    assert torch.equal(first.weights.lm_head, second.weights.lm_head)
    logits = run(first, first.new_cache(BLOCK, 4), [TokenSegment([1, 2, 3], 0, [0])])
    assert logits.isfinite().all()
    assert logits.shape == (1, 101)


def test_what_is_not_executed_is_refused_with_a_sentence():
    mamba = tiny()
    object.__setattr__(mamba, "layers", ((Layer(Mamba(4, 8, 16, 1, 4, dt_rank=2), None), 2),))
    with pytest.raises(PerfmodelError, match="a scan other than Mamba-2 is not executed yet"):
        Decoder(mamba)
    with pytest.raises(PerfmodelError, match="queries and keys without weights is not executed yet"):
        Decoder(tiny((attention(qk_norm=True, qk_norm_width="none"), DenseFFN(8))))
    with pytest.raises(PerfmodelError, match="the computation of cohere models is not executed yet"):
        Decoder(tiny((attention(), DenseFFN(8)), model_type="cohere"))
