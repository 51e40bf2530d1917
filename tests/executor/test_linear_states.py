"""Linear attention: what its states stand for is softmax attention, and steps may cut a sequence anywhere."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import tiny  # noqa: E402

from perfmodel.models.architecture import (  # noqa: E402
    DenseFFN,
    LinearAttention,
    Rope,
)
from perfmodel.models.params import count_parameters  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.models.mixers.linear import _KINDS, _features  # noqa: E402

BLOCK = 4


def linear(kind, size=32, rope=Rope(500.0)):  # noqa: B008
    return LinearAttention(kind, size, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, rope=rope)


def model(kind):
    return tiny((linear(kind), DenseFFN(48)), (linear(kind), DenseFFN(48)))


def run(decoder, cache, *segments):
    with torch.inference_mode():
        return decoder.forward(build_batch(segments, BLOCK), cache)


def text(seed, length):
    return torch.randint(101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", ["performer", "linformer"])
def test_chunks_and_single_tokens_are_one_sequence(kind):
    """The recurrence of decodes against the products of a prompt, over more than one chunk of 128."""
    decoder, tokens = Decoder(model(kind), torch.float32, seed=2), text(1, 150)
    at_once = run(decoder, decoder.new_cache(BLOCK, 40), TokenSegment(tokens, 0, range(40)))
    cache, done = decoder.new_cache(BLOCK, 40), 0
    for length in (131, 1, 1, 7, 1, 9):
        cut = run(decoder, cache, TokenSegment(tokens[done : done + length], done, range(40)))
        done += length
    torch.testing.assert_close(cut, at_once, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["performer", "linformer"])
def test_a_mixed_step_leaves_sequences_to_themselves(kind):
    decoder, one, other = Decoder(model(kind), torch.float32, seed=2), text(3, 21), text(4, 12)
    cache = decoder.new_cache(BLOCK, 40)
    run(decoder, cache, TokenSegment(one[:20], 0, range(8)))
    mixed = run(decoder, cache, TokenSegment(one[20:], 20, range(8)), TokenSegment(other, 0, range(8, 16)))
    for logits, tokens in zip(mixed, (one, other), strict=True):
        alone = run(decoder, decoder.new_cache(BLOCK, 8), TokenSegment(tokens, 0, range(8)))
        torch.testing.assert_close(logits, alone[0], rtol=1e-4, atol=1e-4)


def heads(length=24, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, length, size, generator=generator) for _ in range(3))
    scores = (q @ k.mT / math.sqrt(size)).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    return q[:, None], k, v, torch.softmax(scores, dim=-1) @ v


def test_many_random_features_are_softmax_attention():
    """Choromanski et al. 2020, lemma 1: unbiased, so that the error falls with the root of their number."""
    q, k, v, _ = heads()
    errors = []
    for count in (64, 16_384):
        rows = torch.randn(2, count, 8, generator=torch.Generator().manual_seed(1))
        out, _ = _KINDS["performer"][1](q * 0.5, k * 0.5, v, rows, None, torch.zeros(2, count, 9))
        exact = torch.softmax(
            ((q[:, 0] @ k.mT) * 0.25 / math.sqrt(8)).masked_fill(torch.ones(24, 24).triu(1).bool(), -math.inf), dim=-1
        )
        errors.append((out[:, 0] - exact @ v).abs().max().item())
    assert errors[1] < 0.05 < errors[0]
    product = (_features(q[0, 0] * 0.5, rows[0]) @ _features(k[0] * 0.5, rows[0]).mT).log()
    torch.testing.assert_close(product, q[0, 0] @ k[0].mT / 4 / math.sqrt(8), rtol=0.05, atol=0.1)


def test_a_projection_that_keeps_every_position_is_softmax_attention():
    """With the identity and as many rows as tokens, the last query attends to all of them, each in a row of its own."""
    q, k, v, expected = heads()
    identity, columns = torch.eye(24).expand(2, 24, 24), torch.arange(24)
    out, state = _KINDS["linformer"][1](q, k, v, identity, columns, torch.zeros(2, 24, 16))
    torch.testing.assert_close(out[:, 0, -1], expected[:, -1])
    torch.testing.assert_close(state, torch.cat((k, v), dim=-1))


@pytest.mark.parametrize("kind", ["performer", "linformer"])
def test_weights_are_those_that_are_counted(kind):
    decoder = Decoder(model(kind), torch.float32)
    mixer, counted = decoder.weights.layers[0].mixer, count_parameters(model(kind))
    held = sum(tensor.numel() for tensor in (mixer.qkv, mixer.out, mixer.projection_KRD))
    assert 2 * held == counted.stored["linear_attention"]


def test_random_features_are_orthogonal():
    rows = Decoder(model("performer"), torch.float32).weights.layers[0].mixer.projection_KRD
    block = rows[0, :8] / rows[0, :8].norm(dim=-1, keepdim=True)
    torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=1e-5, atol=1e-5)
