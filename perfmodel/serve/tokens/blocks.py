"""`block_hashes`: who a KV block is, by all tokens up to its end.

As in vLLM's prefix cache (docs.vllm.ai, "Automatic Prefix Caching"): only full blocks have a hash; it covers the hash
of the block before, the block's own tokens, and what else sets its content apart: an adapter, and a salt by which one
tenant's blocks are hidden from another's.
"""

__all__ = ["block_hashes"]

from hashlib import sha256

from perfmodel.serve.tokens.vocabulary import TokenIds

_HASH_BYTES = 8  # of what an engine sees: as many as KV events of vLLM have


def block_hashes(
    ids: TokenIds, block_size: int, salt: str | None = None, adapter: str | None = None
) -> tuple[int, ...]:
    """Hashes of the full blocks of `ids`, 64 bits each; equal ones have equal tokens before and in them.

    block_size: tokens of a block
    salt:       blocks of another salt are others, whatever their tokens
    adapter:    the LoRA adapter whose KV they hold, if any
    """
    parent = sha256(repr((salt, adapter)).encode("utf-8", "surrogatepass")).digest()
    data, width = ids.tobytes(), block_size * ids.itemsize
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        parent = sha256(parent + data[start : start + width]).digest()
        hashes.append(int.from_bytes(parent[:_HASH_BYTES], "big"))
    return tuple(hashes)
