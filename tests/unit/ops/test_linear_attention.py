"""Linear attention by hand: what a token costs does not depend on those before it."""

import pytest

from perfmodel.ops.attention.linear import LinearHeads

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
