"""Linear attention by hand: what a token costs does not depend on those before it."""

import pytest

from perfmodel.models.architecture import LinearAttention
from perfmodel.ops.recurrent import LinearHeads, _linear_prefill, linear_decode, linear_heads
from perfmodel.ops.sharding import Sharding

HEADS, KV_HEADS, HEAD, VALUE, ROWS = 32, 8, 128, 128, 256


@pytest.mark.parametrize("has_features", [True, False])
def test_a_token_turns_into_features_updates_the_state_and_is_read_out(has_features: bool) -> None:
    """Performer: m = 256 random features of q and k, 2 m h FLOPs a head; then per KV head an outer product of m x (h +
    1), the sum of keys with it, 2 FLOPs an element, and per query head as many to read it."""
    heads = LinearHeads(HEADS, KV_HEADS, HEAD, VALUE, ROWS, VALUE + 1, has_features, "bf16", 2.0)
    features = 2 * ROWS * HEAD * (HEADS + KV_HEADS) if has_features else 0
    assert heads.flops_per_token == features + 2 * ROWS * (VALUE + 1) * KV_HEADS + 2 * ROWS * (VALUE + 1) * HEADS
    assert heads.state_elements == KV_HEADS * ROWS * (VALUE + 1)
    assert heads.token_elements == HEADS * HEAD + KV_HEADS * (HEAD + VALUE) + HEADS * VALUE


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("performer", VALUE + 1), ("linformer", HEAD + VALUE)],  # sums of values and of keys; projected keys and values
)
def test_a_state_is_read_once_and_written_after_each_token(kind: str, columns: int) -> None:
    """fp32 states per KV head; q, k, v and the output of a token in 16 bits."""
    mixer = LinearAttention(kind, ROWS, HEADS, KV_HEADS, HEAD, VALUE)
    heads = linear_heads(mixer, Sharding(), "bf16", 2.0)
    state = 4 * KV_HEADS * ROWS * columns
    one, five = (linear_decode(3, heads, queries) for queries in (1, 5))
    assert (one.kv_bytes, five.kv_bytes) == (3 * (1 + 1) * state, 3 * (1 + 5) * state)
    assert five.activation_bytes == 5 * one.activation_bytes == 5 * 3 * 2 * heads.token_elements


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (128, 1), (129, 2), (1000, 8)])
def test_prompts_write_and_read_a_state_per_chunk(tokens: int, chunks: int) -> None:
    heads = linear_heads(LinearAttention("performer", ROWS, HEADS, KV_HEADS, HEAD, VALUE), Sharding(), "bf16", 2.0)
    work = _linear_prefill([(tokens, 0)], heads)
    assert work.kv_bytes == chunks * 2 * 4 * KV_HEADS * ROWS * (VALUE + 1)
    assert work.flops >= tokens * heads.flops_per_token
