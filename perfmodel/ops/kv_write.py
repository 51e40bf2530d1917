"""Writing new keys and values (or latents) into the KV cache."""

__all__ = ["kv_concat", "kv_write"]

from perfmodel.ops.work import Work


def kv_write(
    num_tokens: float, num_elements: int, element_bytes: float, kv_element_bytes: float, *, is_fused: bool = True
) -> Work:
    """Copies `num_elements` per token from the projection's output into the blocks of the cache.

        bytes = n e (b + b_kv): read at the model's dtype, written at the cache's

    `is_fused=False`: an indexed copy of K and one of V, which no measured attention kernel contains (hence another
    name). Source: identity.
    """
    elements = num_tokens * num_elements
    return Work(
        "kv_write" if is_fused else "kv_write_unfused",
        "elementwise",
        activation_bytes=elements * element_bytes,
        kv_bytes=elements * kv_element_bytes,
        rate="vector",
        num_kernels=1 if is_fused else 2,
    )


def kv_concat(name: str, num_calls: int, cached_bytes: float, new_elements: float, sizes: tuple[float, float]) -> Work:
    """A cache that grows by concatenation, as in plain PyTorch: each step reads it and writes it anew, a token longer.

        bytes = 2 C - n b_kv + n b: C of the cache after the step; its n new elements are read at the model's dtype

    in a kernel for K and one for V. num_calls: sequences that decode together lie in one tensor, prompts in one each;
    sizes: b and b_kv. Source: identity; Hugging Face's DynamicCache.
    """
    element_bytes, kv_element_bytes = sizes
    return Work(
        name,
        "elementwise",
        activation_bytes=new_elements * element_bytes,
        kv_bytes=2.0 * cached_bytes - new_elements * kv_element_bytes,
        rate="vector",
        num_kernels=2 * num_calls,
    )
