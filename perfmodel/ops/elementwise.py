"""Bandwidth-bound operators: norms, RoPE, activations and gates, embedding lookup, KV cache writes, sampling."""

from perfmodel.errors import SpecError
from perfmodel.ops.work import Work

FP32_BYTES = 4.0  # in which plain PyTorch modules take norms and softmax
_ARITHMETIC_KERNELS = 6  # square, mean, + epsilon, 1/sqrt, times it, times the weight
_CAST_KERNELS = 2  # to fp32 and back, for narrower models


def elementwise(
    name: str,
    flops: float,
    activation_bytes: float,
    num_kernels: int = 1,
    *,
    weight_bytes: float = 0.0,
    kv_bytes: float = 0.0,
) -> Work:
    """The work of operator `name` on vector units, in `num_kernels` launches. flops, activation_bytes, weight_bytes,
    kv_bytes: as in `Work`"""
    return Work(
        name,
        "elementwise",
        flops=flops,
        rate="vector",
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=kv_bytes,
        num_kernels=num_kernels,
    )


def rms_norm(
    name: str,
    num_tokens: float,
    size: int,
    element_bytes: float,
    *,
    adds_residual: bool = False,
    is_fused: bool = True,
    num_tensors: int = 1,
) -> Work:
    """y = x / rms(x) * g over rows of `size` elements.

        FLOPs = 4 n d (square and sum, two scalings); bytes = 2 n d b: x read, y written

    `adds_residual`: the fused kernel of serving engines, which also reads and rewrites the residual (4 n d b bytes,
    5 n d FLOPs). `is_fused=False`: one kernel per operator of PyTorch's expression: n d (2 b + 5 * 4) bytes, and
    n d (2 b + 2 * 4) more for casts to fp32 and back; the `num_tensors` that share the `size` elements run one after
    another. name: of the operator; num_tokens n; size d; element_bytes b. Source: identity; Hugging Face's
    LlamaRMSNorm."""
    elements = num_tokens * size
    casts = element_bytes != FP32_BYTES
    if is_fused:
        num_kernels, bytes_each = 1, (2 + 2 * adds_residual) * element_bytes
    else:
        num_kernels = num_tensors * (_ARITHMETIC_KERNELS + _CAST_KERNELS * casts)
        bytes_each = (2 + 2 * casts) * element_bytes + (5 + 2 * casts) * FP32_BYTES
    flops = (4.0 + adds_residual) * elements
    return elementwise(name, flops, bytes_each * elements, num_kernels, weight_bytes=size * element_bytes)


def residual_add(name: str, num_tokens: float, size: int, element_bytes: float) -> Work:
    """x + y: n d FLOPs, 3 n d b bytes. Source: identity.

    name: of the operator; num_tokens n; size d; element_bytes b"""
    elements = num_tokens * size
    return elementwise(name, elements, 3 * elements * element_bytes)


def residual_mix(
    num_tokens: float, size: int, element_bytes: float, num_read: float, num_written: float, num_weights: int
) -> Work:
    """Residuals that are several hidden states: num_read r and num_written w beside a block's output and the next one's
    input, by num_weights that a token's r states are projected to.

        FLOPs = 2 n d r weights + 4 n d (r + w)       bytes = n d b (r + w + 2), and the projection, in fp32

    num_tokens n; size d; element_bytes b. One kernel behind a block and before the next (vLLM: mhc_fused_post_pre,
    attn_res). Source: DeepSeek-V4 (2026), section 2.2; Kimi K3 (2026), attention residuals"""
    elements = num_tokens * size
    flops = elements * (2.0 * num_read * num_weights + 4.0 * (num_read + num_written))
    num_bytes = elements * element_bytes * (num_read + num_written + 2)
    return elementwise("residual_mix", flops, num_bytes, weight_bytes=num_read * size * num_weights * FP32_BYTES)


_FLOPS_PER_ELEMENT = {"relu": 1.0, "relu2": 2.0, "silu": 5.0, "gelu": 8.0}  # an exponential counted as four


def activation(
    num_tokens: float, size: int, element_bytes: float, *, function: str = "silu", is_gated: bool = True, is_fused: bool
) -> Work:
    """act(g) * u (gated, SwiGLU-like) or act(x), over `size` output elements per token.

        bytes: gated and fused 3 n s b (g and u read, product written); gated and unfused 5 n s b in two kernels
               plain 2 n s b; relu2 unfused 4 n s b in two (the square is a kernel of its own)

    FLOPs per element depend on `function` and never matter. num_tokens n; element_bytes b; is_gated: multiplied by u;
    is_fused: in one kernel. Source: Shazeer 2020 (GLU variants); identity."""
    elements = num_tokens * size
    kernels = 1 if is_fused else 1 + is_gated + (function == "relu2")
    passes = 2 * kernels + is_gated
    name = f"{function}_and_mul" if is_gated else function
    flops = (_FLOPS_PER_ELEMENT.get(function, 5.0) + is_gated) * elements
    return elementwise(name, flops, passes * elements * element_bytes, kernels)


def gate(name: str, num_tokens: float, size: int, element_bytes: float, *, is_fused: bool = True) -> Work:
    """x * sigmoid(g) over `size` elements per token: 3 n s b bytes; unfused 5 n s b, 2 kernels. Source: identity.

    name: of the operator; num_tokens n; element_bytes b; is_fused: in one kernel"""
    elements = num_tokens * size
    passes, num_kernels = (3, 1) if is_fused else (5, 2)
    return elementwise(name, 6.0 * elements, passes * elements * element_bytes, num_kernels)


# q and k each: negate one half, concatenate the halves, times sin, times cos, sum: (half + half) + 2 + 2 + 2 + 3
# passes, as the tables stay in cache.
_EAGER_KERNELS, _EAGER_PASSES = 10, 10


def rope(num_tokens: float, num_elements: int, element_bytes: float, *, is_fused: bool = True) -> Work:
    """Rotates `num_elements` elements e per token (query and key heads of this device) in place.

        FLOPs = 3 n e (two products and a sum per element); bytes = 2 n e b; the cos/sin table stays in cache

    `is_fused=False`: PyTorch's x cos + rotate_half(x) sin, operator by operator: 10 n e b in 10 kernels; named apart,
    as no measured attention kernel contains it. num_tokens n; element_bytes b. Source: Su et al. 2021, eq. 34; Hugging
    Face's apply_rotary_pos_emb."""
    elements = num_tokens * num_elements
    name, passes, num_kernels = ("rope", 2, 1) if is_fused else ("rope_unfused", _EAGER_PASSES, _EAGER_KERNELS)
    return elementwise(name, 3.0 * elements, passes * elements * element_bytes, num_kernels)


def embedding(num_tokens: float, hidden_size: int, element_bytes: float, *, num_tables: int = 1) -> Work:
    """One row per token of each table (tokens, learned positions) read, their sum written: (t + 1) n d b bytes.

    Repeated rows count each time. Under tensor parallelism each rank gathers from its vocabulary slice and writes zeros
    elsewhere, so traffic counts in full. num_tokens n; hidden_size d; element_bytes b; num_tables t. Source: identity.
    """
    row_bytes = hidden_size * element_bytes
    read_bytes = num_tables * num_tokens * row_bytes
    return Work("embedding", "embedding", weight_bytes=read_bytes, activation_bytes=num_tokens * row_bytes)


def kv_write(
    num_tokens: float, num_elements: int, element_bytes: float, kv_element_bytes: float, *, is_fused: bool = True
) -> Work:
    """Copies `num_elements` e per token from the projection's output into KV blocks.

        bytes = n e (b + b_kv): read at the model's dtype, written at the cache's

    `is_fused=False`: an indexed copy of K and one of V, named apart, as no measured attention kernel contains them.
    num_tokens n: new; element_bytes b, kv_element_bytes b_kv: before and in the cache. Source: identity."""
    elements = num_tokens * num_elements
    name, num_kernels = ("kv_write", 1) if is_fused else ("kv_write_unfused", 2)
    return elementwise(name, 0.0, elements * element_bytes, num_kernels, kv_bytes=elements * kv_element_bytes)


def kv_concat(name: str, num_calls: int, cached_bytes: float, new_elements: float, sizes: tuple[float, float]) -> Work:
    """A KV cache that grows by concatenation, as in plain PyTorch: each step reads it and writes it anew.

        bytes = 2 C - n b_kv + n b: C of the cache after the step; its n new elements are read at the model's dtype

    One kernel for K and one for V per call. num_calls: decoding sequences share one tensor, prompts have one each;
    sizes: b and b_kv; name: of the operator; cached_bytes C; new_elements n. Source: identity; Hugging Face's
    DynamicCache."""
    element_bytes, kv_element_bytes = sizes
    kv_bytes = 2.0 * cached_bytes - new_elements * kv_element_bytes
    return elementwise(name, 0.0, new_elements * element_bytes, 2 * num_calls, kv_bytes=kv_bytes)


# HBM traffic per logit, counted. greedy: cast to fp32 (2 read, 4 written), argmax (4 read). random: cast 6, temperature
# in place 8, softmax 12, noise 4, its quotient 12, argmax 4. Top-k and top-p besides (vllm/v1/sample/ops/
# topk_topp_sampler.py): indices 8, a radix sort of 32 bits by 6 with keys read twice and int64 indices moved, 6 x 28,
# two masks of 5 and their fills of 9, softmax 12, cumulative sum 12, scatter 24. Servers are measured to take half as
# much again; theirs is a calibration.
BYTES_PER_LOGIT = {"greedy": 10.0, "random": 46.0, "top_k": 298.0, "top_p": 298.0}
_KERNELS = {"greedy": 2, "random": 6, "top_k": 20, "top_p": 20}


def sample(num_samples: float, vocab_size: int, method: str = "greedy", bytes_per_logit: float | None = None) -> Work:
    """One token for each of `num_samples` rows of `vocab_size` logits: B V bytes_per_logit of HBM traffic.

    bytes_per_logit: None: that of `method` (BYTES_PER_LOGIT). Every tensor-parallel rank samples from the gathered
    logits. Raises SpecError for a method that is none of perfmodel.models.spec.SamplingMethod."""
    if method not in BYTES_PER_LOGIT:
        raise SpecError(f"sampling: got {method!r}; expected {', '.join(BYTES_PER_LOGIT)}.")
    per_logit = BYTES_PER_LOGIT[method] if bytes_per_logit is None else bytes_per_logit
    logits = num_samples * vocab_size
    return Work(
        "sample",
        "sampling",
        flops=2.0 * logits,
        rate="vector",
        activation_bytes=per_logit * logits,
        num_kernels=_KERNELS[method] if num_samples else 0,
    )
