"""Writing new keys and values (or latents) into the paged KV cache."""

__all__ = ["kv_write"]

from perfmodel.ops.work import Work


def kv_write(num_tokens: float, num_elements: int, element_bytes: float, kv_element_bytes: float) -> Work:
    """Copies `num_elements` per token from the projection's output into the blocks of the cache.

        bytes = n e (b + b_kv): read at the model's dtype, written at the cache's

    Source: identity.
    """
    elements = num_tokens * num_elements
    return Work(
        "kv_write",
        "elementwise",
        activation_bytes=elements * element_bytes,
        kv_bytes=elements * kv_element_bytes,
        rate="vector",
        extent={"tokens": num_tokens, "size": num_elements},
    )
