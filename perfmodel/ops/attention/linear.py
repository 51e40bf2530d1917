"""Linear attention with constant-size state: Performer's features and Linformer's projected rows.

Per KV head the state is `size` rows m of r columns: h_v sums of values and one of keys (Performer), or projected keys
and values, h_k + h_v (Linformer). Kept in fp32, like the states of `scan`. Prefill runs in chunks of 128 tokens as
GEMMs: scores inside a chunk, the state between chunks.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from perfmodel.models.architecture import LinearAttention
from perfmodel.ops.elementwise import rope
from perfmodel.ops.linear import linear_nodes
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_prefills, on_tokens
from perfmodel.ops.recurrent import STATE_BYTES
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import Work

_CHUNK = 128  # tokens


class LinearHeads(NamedTuple):
    """Heads on one device. rows m: features or projected rows; columns r: elements of a row of the state."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rows: int
    columns: int
    has_features: bool
    dtype: str
    element_bytes: float

    @property
    def state_elements(self) -> int:
        return self.num_kv_heads * self.rows * self.columns

    @property
    def token_elements(self) -> int:
        """Elements of q, k, v and o per token."""
        width = self.head_dim + self.v_head_dim
        return (self.num_heads + self.num_kv_heads) * width

    @property
    def flops_per_token(self) -> float:
        """Per head: features of q and k 2 m h_k, read-out 2 m r; per KV head: state update 2 m r."""
        features = 2.0 * self.rows * self.head_dim * (self.num_heads + self.num_kv_heads) if self.has_features else 0.0
        return features + 2.0 * self.rows * self.columns * (self.num_heads + self.num_kv_heads)


def linear_heads(mixer: LinearAttention, shard: Sharding, dtype: str, element_bytes: float) -> LinearHeads:
    """The mixer's heads on one device.

    shard: tensor parallelism; dtype: of the products, with element_bytes per element
    """
    has_features = mixer.kind == "performer"
    return LinearHeads(
        shard.columns(mixer.num_heads),
        shard.kv_heads(mixer.num_kv_heads),
        mixer.head_dim,
        mixer.v_head_dim,
        mixer.size,
        mixer.v_head_dim + (1 if has_features else mixer.head_dim),
        has_features,
        dtype,
        element_bytes,
    )


def linear_decode(num_seqs: float, heads: LinearHeads, queries: float = 1.0) -> Work:
    """q tokens per sequence: the state is read, updated, multiplied by the query's features and written back.

        bytes = 4 (1 + q) B K m r (fp32: read once, written after each of q tokens) + q B (q, k, v, o) b

    Storing the state after each token allows rejected drafts to be rolled back.
    Source: Katharopoulos et al. 2020, eq. 18 to 20.
    """
    return Work(
        "linear_decode",
        "scan",
        flops=queries * num_seqs * heads.flops_per_token,
        rate="vector",
        activation_bytes=queries * num_seqs * heads.token_elements * heads.element_bytes,
        kv_bytes=(1.0 + queries) * num_seqs * heads.state_elements * STATE_BYTES,
        num_kernels=1 if num_seqs else 0,
    )


def _linear_prefill(prefills: Sequence[tuple[int, int]], heads: LinearHeads) -> Work:
    """T new tokens per prompt: T flops_per_token and, inside chunks of c tokens, T c / 2 scores per head.

        FLOPs = T flops_per_token + H T min(c, T) (m + h_v)      half of 2 T c (m + h_v): causal
        bytes = T (q, k, v, o) b + per chunk the state written and read in fp32

    Source: Choromanski et al. 2020, section 3.1; Hua et al. 2022 (chunks).
    """
    tokens = sum(t for t, _ in prefills)
    if not tokens:
        return Work("linear_prefill", "scan", rate=heads.dtype, num_kernels=0)
    inner = sum(t * min(_CHUNK, t) for t, _ in prefills) * heads.num_heads * (heads.rows + heads.v_head_dim)
    chunks = sum(ceil(t / _CHUNK) for t, _ in prefills)
    return Work(
        "linear_prefill",
        "scan",
        flops=tokens * heads.flops_per_token + inner,
        rate=heads.dtype,
        activation_bytes=tokens * heads.token_elements * heads.element_bytes,
        kv_bytes=2.0 * chunks * heads.state_elements * STATE_BYTES,
        num_kernels=3,  # states of chunks, their running sum, outputs
    )


def linear_attention_nodes(mixer: LinearAttention, context: LayerContext) -> list[OperatorNode]:
    """QKV projection, RoPE, linear attention of prompts and of decodes, output projection."""
    heads = linear_heads(mixer, context.shard, context.dtype, context.element_bytes)
    form, size, fused = context.format("linear_attention"), context.element_bytes, context.is_fused
    widths = {
        "q_proj": heads.num_heads * heads.head_dim,
        "k_proj": heads.num_kv_heads * heads.head_dim,
        "v_proj": heads.num_kv_heads * heads.v_head_dim,
    }
    if fused:
        widths = {"qkv_proj": sum(widths.values())}
    nodes = linear_nodes(widths, context.hidden, form, has_bias=mixer.qkv_bias)
    rotated = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    if mixer.rope is not None:
        nodes.append(on_tokens("rope", lambda n: rope(n, rotated, size, is_fused=fused)))
    nodes.append(on_prefills("linear_prefill", lambda prefills: _linear_prefill(prefills, heads)))
    nodes.append(on_decodes("linear_decode", lambda seqs, _, queries: linear_decode(seqs, heads, queries)))
    out = heads.num_heads * heads.v_head_dim
    return nodes + linear_nodes({"o_proj": context.hidden}, out, form, has_bias=mixer.out_bias)
