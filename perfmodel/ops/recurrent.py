"""State-space scans and linear attention: a state of constant size per sequence instead of a KV cache.

Linear attention: Performer's features and Linformer's projected rows. Per KV head the state is `size` rows m of r
columns: h_v sums of values and one of keys (Performer), or projected keys and values, h_k + h_v (Linformer), in fp32.

Prefill runs GEMMs inside chunks of c tokens and a recurrence between them; decode is bound by reading and writing the
state. States of scans are kept in fp32, as configurations that name a format have it (Qwen3.5, Nemotron-3), or in the
engine's; between chunks in fp32. The window of the causal convolution is in the model's dtype."""

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import NamedTuple

from perfmodel.models.architecture import GatedDeltaNet, LinearAttention, Mamba
from perfmodel.models.number_formats import bytes_per_weight
from perfmodel.ops.collectives import all_reduce, tensor_parallel
from perfmodel.ops.elementwise import elementwise, gate, rms_norm, rope
from perfmodel.ops.linear import gemm, linear_nodes
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_prefills, on_tokens
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import Work

STATE_BYTES = 4.0  # per element of a state in fp32
_DELTA_CHUNK = 64  # tokens per chunk of the gated delta rule (flash-linear-attention)
_LINEAR_CHUNK = 128  # tokens per chunk of linear attention: scores inside as GEMMs, the state between


class StateShape(NamedTuple):
    """A recurrent state on one device: `num_heads` matrices of rows x columns, driven by `num_groups` input groups.

    rows:    key size of linear attention, state size N of a state-space model
    columns: value size of linear attention, head size P of a state-space model
    inputs:  elements per token read and written by the scan (q, k, v or x, B, C, and the output)
    state_bytes: of an element of the state, as it is kept between steps"""

    num_heads: int
    rows: int
    columns: int
    num_groups: int
    inputs: int
    dtype: str
    element_bytes: float
    state_bytes: float = STATE_BYTES

    @property
    def state_elements(self) -> int:
        return self.num_heads * self.rows * self.columns


def _causal_conv(num_tokens: float, channels: int, kernel: int, element_bytes: float) -> Work:
    """Depthwise causal convolution with activation: FLOPs = 2 k n c (+ 5 n c), bytes 2 n c b (+ weights c k b)."""
    elements = num_tokens * channels
    weight_bytes = channels * kernel * element_bytes
    flops, num_bytes = (2.0 * kernel + 5.0) * elements, 2 * elements * element_bytes
    return elementwise("causal_conv", flops, num_bytes, weight_bytes=weight_bytes)


def chunked_ssd(prefills: Sequence[tuple[int, int]], state: StateShape, chunk: int) -> Work:
    """Mamba-2's chunked scan (state-space duality), per token, H heads of P, state N, G groups, chunk c:

        FLOPs = 2 c N G (C B^T) + 2 c P H (the masked product with x) + 4 N P H (into and out of the states)
        bytes = inputs b + (1/c) 8 N P H: every chunk's state is written and read in fp32

    Source: Dao and Gu 2024, listing 1."""
    tokens = sum(t for t, _ in prefills)
    per_token = 2.0 * chunk * (state.rows * state.num_groups + state.columns * state.num_heads)
    flops = tokens * (per_token + 4.0 * state.state_elements)
    return _prefill_scan("chunked_scan", prefills, state, flops, tokens / chunk, num_kernels=5, rate=state.dtype)


def chunked_delta_rule(prefills: Sequence[tuple[int, int]], state: StateShape) -> Work:
    """The gated delta rule in chunks of c = 64 (WY form), per token and value head, key size k, value size v:

        FLOPs = 2 c (k + k + v) (K K^T, T K, T V) + c^2 (triangular solve for T) + 2 c (k + v) (Q K^T, scores V)
                + 6 k v (state into W, state into the output, keys into the state)

    Source: Yang et al. 2024, "Parallelizing linear transformers with the delta rule", section 3; 2025 (gated), eq. 10.
    """
    tokens = sum(t for t, _ in prefills)
    k, v, c = state.rows, state.columns, _DELTA_CHUNK
    per_head = 2.0 * c * (3 * k + 2 * v) + c * c + 6.0 * k * v
    flops = tokens * state.num_heads * per_head
    return _prefill_scan("chunked_scan", prefills, state, flops, tokens / c, num_kernels=6, rate=state.dtype)


def selective_scan(prefills: Sequence[tuple[int, int]], state: StateShape) -> Work:
    """Mamba-1's fused scan, token after token in SRAM: 9 FLOPs per token and state element at the vector rate.

    Per element: exp(dt A) as 4, two products, a multiply-add into h, a multiply-add into y less shared ones.
    Source: Gu and Dao 2023, section 3.3 and appendix D."""
    flops = 9.0 * sum(t for t, _ in prefills) * state.state_elements
    return _prefill_scan("selective_scan", prefills, state, flops, 0.0, num_kernels=1, rate="vector")


def _prefill_scan(
    name: str,
    prefills: Sequence[tuple[int, int]],
    state: StateShape,
    flops: float,
    num_chunks: float,
    num_kernels: int,
    rate: str,
) -> Work:
    tokens = sum(t for t, _ in prefills)
    return Work(
        name,
        "scan",
        flops=flops,
        rate=rate,
        activation_bytes=tokens * state.inputs * state.element_bytes
        + 2.0 * num_chunks * state.state_elements * STATE_BYTES,
        kv_bytes=2.0 * len(prefills) * state.state_elements * state.state_bytes,
        num_kernels=num_kernels if prefills else 0,
    )


def state_update(
    num_seqs: int, state: StateShape, name: str = "state_update", flops_per_element: float = 7.0, queries: float = 1.0
) -> Work:
    """q tokens per sequence: the state is read, decayed, updated, multiplied by the query and written back.

        FLOPs = 7 q B H k v for the delta rule (decay 1, k^T S 2, outer product 2, q^T S 2); 5 to 9 for Mamba
        bytes = s (1 + q) B H k v (state of s bytes: read once, written after each token) + q B inputs b

    Storing the state after each token allows rejected drafts to be rolled back. num_seqs B: sequences of `queries` q
    tokens each; name: of the operator; flops_per_element: per state element and token. Source: Yang et al. 2025, eq. 10
    in recurrent form; Gu and Dao 2023, algorithm 1."""
    return Work(
        name,
        "scan",
        flops=flops_per_element * queries * num_seqs * state.state_elements,
        rate="vector",
        activation_bytes=queries * num_seqs * state.inputs * state.element_bytes,
        kv_bytes=(1.0 + queries) * num_seqs * state.state_elements * state.state_bytes,
        num_kernels=1 if num_seqs else 0,
    )


def state_shape(mixer: Mamba | GatedDeltaNet, tp: int, dtype: str, element_bytes: float) -> StateShape:
    """The mixer's recurrent state on one of `tp` devices.

    dtype: of the products; element_bytes: of inputs and outputs"""
    kept = bytes_per_weight(mixer.state_format)
    if isinstance(mixer, GatedDeltaNet):
        heads, key_heads = ceil(mixer.num_value_heads / tp), ceil(mixer.num_key_heads / tp)
        rows, columns = mixer.key_head_dim, mixer.value_head_dim
        decays = key_heads * rows if mixer.decay_rank is not None else 0
        inputs = 2 * key_heads * rows + 2 * heads * columns + decays
        return StateShape(heads, rows, columns, key_heads, inputs, dtype, element_bytes, kept)
    heads, groups = ceil(mixer.num_heads / tp), max(1, ceil(mixer.num_groups / tp))
    rows, columns = mixer.state_size, mixer.head_dim
    inputs = 2 * heads * columns + 2 * groups * rows
    return StateShape(heads, rows, columns, groups, inputs, dtype, element_bytes, kept)


def conv_channels(mixer: Mamba | GatedDeltaNet, state: StateShape) -> int:
    """Channels of the causal convolution on one device: q, k, v; x, B, C; or x alone (Mamba-1)."""
    values = state.num_heads * state.columns
    if isinstance(mixer, Mamba) and mixer.dt_rank is not None:
        return values
    return values + 2 * state.num_groups * state.rows


def delta_net_nodes(mixer: GatedDeltaNet, context: LayerContext) -> list[OperatorNode]:
    """Projections of q, k, v, z and of the gates a, b; convolution; delta rule; gated norm; output projection. Kimi
    delta attention projects the decays of key channels, and z, through thin matrices.

    Source: Kimi Linear (2025), section 3; vLLM, vllm/models/kimi_k3/nvidia/kda.py"""
    state = state_shape(mixer, context.shard.tp, context.dtype, context.element_bytes)
    values = state.num_heads * state.columns
    channels = conv_channels(mixer, state)
    form, hidden, size = context.format("linear_attention"), context.hidden, context.element_bytes
    width = channels + (values if mixer.gate_rank is None else 0)
    ranks = (mixer.decay_rank or 0) + (mixer.gate_rank or 0)  # replicated, as the thin sides of both products are
    gates = state.num_heads * (2 if mixer.decay_rank is None else 1) + ranks
    wide = {"decay_proj": (state.num_groups * state.rows, mixer.decay_rank), "gate_proj": (values, mixer.gate_rank)}
    return [
        on_tokens("in_proj", partial(gemm, "in_proj", n=width, k=hidden, form=form)),
        on_tokens("gates_proj", partial(gemm, "gates_proj", n=gates, k=hidden, form=form)),
        *(on_tokens(name, partial(gemm, name, n=n, k=k, form=form)) for name, (n, k) in wide.items() if k),
        on_tokens("causal_conv", lambda n: _causal_conv(n, channels, mixer.conv_kernel, size)),
        on_prefills("chunked_scan", lambda prefills: chunked_delta_rule(prefills, state)),
        on_decodes("state_update", lambda seqs, _, queries: state_update(seqs, state, queries=queries)),
        *_gated_norm(values, context),
        on_tokens("out_proj", partial(gemm, "out_proj", n=hidden, k=values, form=form)),
    ]


def mamba_nodes(mixer: Mamba, context: LayerContext) -> list[OperatorNode]:
    """Input projection, convolution, scan, gate, output projection; Mamba-1 projects x to dt, B and C in between."""
    state = state_shape(mixer, context.shard.tp, context.dtype, context.element_bytes)
    inner = state.num_heads * state.columns
    channels = conv_channels(mixer, state)
    form, hidden, size = context.format("linear_attention"), context.hidden, context.element_bytes
    bias, dt_rank = mixer.proj_bias, mixer.dt_rank
    width = 2 * inner if dt_rank is not None else inner + channels + state.num_heads

    def scan(prefills: Sequence[tuple[int, int]]) -> Work:
        return chunked_ssd(prefills, state, mixer.chunk_size) if dt_rank is None else selective_scan(prefills, state)

    flops = 5.0 if dt_rank is None else 9.0  # Mamba-2's decay is one number per head
    nodes = [
        on_tokens("in_proj", partial(gemm, "in_proj", n=width, k=hidden, form=form, has_bias=bias)),
        on_tokens("causal_conv", lambda n: _causal_conv(n, channels, mixer.conv_kernel, size)),
    ]
    if dt_rank is not None:
        columns = dt_rank + 2 * mixer.state_size  # dt, B and C, all-reduced as the inner width is cut
        nodes += [
            on_tokens("x_proj", partial(gemm, "x_proj", n=columns, k=inner, form=form)),
            *tensor_parallel(all_reduce, "x_proj_all_reduce", columns * size, context),
            on_tokens("dt_proj", partial(gemm, "dt_proj", n=inner, k=dt_rank, form=form)),
        ]
    return [
        *nodes,
        on_prefills("chunked_scan" if dt_rank is None else "selective_scan", scan),
        on_decodes("state_update", lambda seqs, _, queries: state_update(seqs, state, "state_update", flops, queries)),
        *(_gated_norm(inner, context) if dt_rank is None and mixer.inner_norm else []),
        on_tokens("out_proj", partial(gemm, "out_proj", n=hidden, k=inner, form=form, has_bias=bias)),
    ]


def _gated_norm(width: int, context: LayerContext) -> list[OperatorNode]:
    """Gated norm of the scan's output: one kernel, or norm and gate when unfused."""
    size = context.element_bytes
    if context.is_fused:
        return [on_tokens("gated_norm", lambda n: gate("gated_norm", n, width, size))]
    return [
        on_tokens("gated_norm", lambda n: rms_norm("gated_norm", n, width, size, is_fused=False)),
        on_tokens("output_gate", lambda n: gate("output_gate", n, width, size, is_fused=False)),
    ]


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
        return (self.num_heads + self.num_kv_heads) * (self.head_dim + self.v_head_dim)

    @property
    def flops_per_token(self) -> float:
        """Per head: features of q and k 2 m h_k, read-out 2 m r; per KV head: state update 2 m r."""
        features = 2.0 * self.rows * self.head_dim * (self.num_heads + self.num_kv_heads) if self.has_features else 0.0
        return features + 2.0 * self.rows * self.columns * (self.num_heads + self.num_kv_heads)


def linear_heads(mixer: LinearAttention, shard: Sharding, dtype: str, element_bytes: float) -> LinearHeads:
    """The mixer's heads on one device.

    shard: tensor parallelism; dtype: of the products, with element_bytes per element"""
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
    Source: Katharopoulos et al. 2020, eq. 18 to 20."""
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

    Source: Choromanski et al. 2020, section 3.1; Hua et al. 2022 (chunks)."""
    tokens = sum(t for t, _ in prefills)
    if not tokens:
        return Work("linear_prefill", "scan", rate=heads.dtype, num_kernels=0)
    inner = sum(t * min(_LINEAR_CHUNK, t) for t, _ in prefills) * heads.num_heads * (heads.rows + heads.v_head_dim)
    chunks = sum(ceil(t / _LINEAR_CHUNK) for t, _ in prefills)
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
