"""What a decoder-only language model is made of: mixers, feed-forward blocks, layers, rotary positions.

A layer is a *mixer* (attention of some kind, a state-space scan, or none) followed by a *feed-forward* block (dense,
mixture of experts, or none), each behind its own pre-norm with a residual connection. Hybrids such as Nemotron-H, where
one layer holds only one of the two, use None for the other. All sizes are in elements and before any sharding."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How frequencies are stretched for contexts beyond the trained one. Names of kinds and fields are those of
    transformers' `rope_parameters` (modeling_rope_utils.py).

    kind:               linear | dynamic | llama3 | yarn | longrope; others are not executed
    factor:             by which the context grows; None where the file does not say
    original_positions: tokens of the trained context
    low_freq_factor, high_freq_factor: llama3: wavelengths beyond original / low are divided by `factor`, those below
                        original / high stay, and those in between are blended
    beta_fast, beta_slow, truncates: yarn: rotations within the trained context that bound the blend, in whole elements
    amplitude:          cos and sin are multiplied by it
    short_factors, long_factors: longrope: a divisor for each frequency, for contexts up to the trained one and beyond
    """

    kind: str
    factor: float | None = None
    original_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    amplitude: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a layer.

    theta: base of the frequencies; transformers' LlamaConfig has 10,000 where a file leaves it open
    dim:   the first elements of a head that rotate; None: all
    scaling: None where frequencies are as trained
    is_interleaved: the file pairs elements 2i and 2i + 1 instead of i and i + dim / 2 (DeepSeek, GLM-4)"""

    theta: float = 10_000.0
    dim: int | None = None
    scaling: RopeScaling | None = None
    is_interleaved: bool = False


DEFAULT_ROPE = Rope()


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """Number formats of the linear layers.

    weights:     format of quantized weights ("bf16", "fp8", "int8", "int4", "fp4", "mxfp4", ...)
    activations: format the matrix multiplication reads; None keeps the model's dtype (weight-only)
    group_size:  weights per scale along the input; 0 = one scale per tensor or channel
    group_rows:  output rows that share those scales: 128 for the 128 x 128 blocks of DeepSeek's FP8, else 1
    kept:        component names left in the model's dtype, among COMPONENTS; norms always are
    outlier_share: of the inputs, multiplied apart in the model's dtype (LLM.int8)
    bits: (component, bits of a stored weight) where its tensors are in several formats, a mean over them
    mix:  llama.cpp's name of which tensor is in which format (a key of GGUF_MIXES); empty: a file's tensors say it
    is_weight_only: a kernel dequantizes the weights and multiplies in the model's dtype, whatever `activations` say:
                    the device has no units for them (Marlin)
    inputs_come_quantized: the operator before a linear layer writes its input in that format, with scales known ahead
    kv_cache:    format of keys and values; None: the model's dtype
    kv_group_size: of its elements that share a scale and a zero point of 16 bits each; 0: too many to count
    kv_recent:   (tokens, format) of the newest tokens of a sequence, newest first, where those differ"""

    method: str = "none"
    weights: str | None = None
    activations: str | None = None
    group_size: int = 0
    group_rows: int = 1
    kv_cache: str | None = None
    kept: frozenset[str] = frozenset({"embedding", "lm_head", "router", "norms"})
    inputs_come_quantized: bool = False
    kv_group_size: int = 0
    kv_recent: tuple[tuple[int, str], ...] = ()
    bits: tuple[tuple[str, float], ...] = ()
    mix: str = ""
    outlier_share: float = 0.0
    is_weight_only: bool = False


@dataclass(frozen=True, slots=True)
class BlockSparsity:
    """A query's block sees `num_blocks` blocks of `block` tokens, or the share `fraction` of those up to its own.

    num_globals, num_random: how many of them are the first ones, and lie anywhere; the others are the nearest"""

    block: int
    num_blocks: int | None = None
    fraction: float | None = None
    num_globals: int = 0
    num_random: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with `num_heads` query heads sharing `num_kv_heads` key/value heads (MHA, GQA, MQA)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None  # a query sees the last `window` tokens (sliding window)
    chunk: int | None = None  # a query sees its own chunk of this many tokens (Llama 4)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_width: str = "head"  # head: one weight of head_dim | all_heads: weights over all heads | none: no weight
    output_gate: bool = False  # a gate as wide as the output, projected beside q (Qwen3-Next, Qwen3.5)
    sinks: bool = False  # one learned sink logit per head (gpt-oss)
    rope: Rope | None = DEFAULT_ROPE  # None: positions are not rotated
    softmax_scale: float | None = None  # of scores, where it is not 1 / sqrt(head_dim) (Gemma, Granite)
    logit_cap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2)
    num_sink_tokens: int = 0  # first tokens that a query sees beside its window (StreamingLLM)
    is_rolling: bool = False  # keys that left the window are overwritten
    sparsity: BlockSparsity | None = None
    qkv_rank: int | None = None  # of the projections, where they are products of two thin matrices
    out_rank: int | None = None
    q_rank: int | None = None  # of the queries' projection alone, with a norm between its halves (Step3's MFA)
    evicts_to: int | None = None  # tokens that eviction by score leaves of a sequence
    num_recent_tokens: int = 0  # of those, the newest, which stay whatever their scores
    is_causal: bool = True  # else a query sees its whole prompt, or the `window` tokens around it (encoders)
    indexer: "Indexer | None" = None  # chooses the blocks of `sparsity` by the scores of their tokens (MiniMax-M3)

    @property
    def span(self) -> int | None:
        """The most tokens that a query sees, however long the context is; of a prompt's, those computed before it."""
        if self.evicts_to is not None:
            return self.evicts_to
        if self.window is not None:
            return self.window + self.num_sink_tokens
        if self.chunk is None and self.sparsity is not None and self.sparsity.num_blocks is not None:
            return self.sparsity.block * self.sparsity.num_blocks
        return self.chunk


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Attention with a state of `size` rows per KV head instead of a growing cache.

    performer: `size` random features of a key, times its value, summed; linformer: keys, values as `size` rows"""

    kind: str
    size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    rope: Rope | None = DEFAULT_ROPE


@dataclass(frozen=True, slots=True)
class Indexer:
    """The lightning indexer of DeepSeek sparse attention: scores all tokens, keeps `top_k` for attention (MiniMax-M3:
    so many blocks of tokens).

    key_bytes, scale_bytes: of an element of a cached key, and beside a key
    is_shared: the choice is that of the nearest earlier layer with an indexer of its own (GLM-5.2)"""

    num_heads: int
    head_dim: int
    top_k: int
    key_bytes: float = 1.0  # fp8
    scale_bytes: float = 4.0
    is_shared: bool = False

    @property
    def cached_bytes(self) -> float:
        """Bytes of a token's cached key."""
        return 0.0 if self.is_shared else self.head_dim * self.key_bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): the cache holds `kv_lora_rank + qk_rope_head_dim` elements a token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None
    rope: Rope | None = DEFAULT_ROPE  # of the rotary part of queries and keys; None: not rotated (Kimi-Linear)
    softmax_scale: float | None = None  # of scores, where it is not 1 / sqrt(nope + rope)
    output_gate: bool = False  # a gate as wide as the output, projected from the input (Kimi-K3)


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """The attention of DeepSeek-V4: one key of `head_dim` elements for all heads, which is its value, too.

    A query sees the keys of the last `window` tokens, and one compressed key for every `ratio` tokens before it: all of
    them (HCA), or those that an indexer keeps (CSA), which scores keys compressed alike. A compressor weighs `ratio`
    tokens, with an indexer 2 `ratio`, half of which the next one sees again. ratio 0: the window alone. Outputs are
    projected in `o_groups` groups of heads, to `o_lora_rank` each, then to the hidden size.
    Source: DeepSeek-V4 (2026), section 2.3; transformers, models/deepseek_v4/modeling_deepseek_v4.py"""

    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratio: int = 0
    indexer: Indexer | None = None
    rope: Rope | None = DEFAULT_ROPE

    @property
    def num_overlapping(self) -> int:
        """Compressed keys that a token is part of."""
        return 2 if self.indexer is not None else 1 if self.ratio else 0


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention with a gated delta rule (Qwen3-Next, Qwen3.5): a state of key_dim x value_dim per value head.

    decay_rank: every element of a key decays by a factor of its own, projected through so many (Kimi delta attention);
                None: one factor per head
    gate_rank:  of the output gate, where that is projected through so many"""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_format: str = "fp32"  # in which the state is kept between steps
    names_state_format: bool = True  # the configuration does; else it is the engine's to choose
    decay_rank: int | None = None
    gate_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Mamba:
    """A selective state-space mixer: Mamba-2; Mamba-1 is `num_heads = d_inner, head_dim = 1` with dt_rank."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    chunk_size: int = 256
    dt_rank: int | None = None
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norm: bool = True  # a gated norm before the output projection (Mamba-2), norms on dt, B, C (Jamba)
    dt_min: float = 0.0  # limits of the time step
    dt_max: float | None = None
    state_format: str = "fp32"  # in which the state is kept between steps


@dataclass(frozen=True, slots=True)
class DenseFFN:
    """`intermediate_size` wide; gated (SwiGLU-like: gate, up, down) or plain (up, down)."""

    intermediate_size: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    up_rank: int | None = None  # of gate and up together, where they are products of two thin matrices
    down_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """How the logits of a router become experts and their weights.

    scoring:      softmax over all experts, or the sigmoid of each
    renormalizes: the weights of the chosen experts are divided by their sum
    scale:        and then multiplied by this
    bias_chooses: the router's bias is added to the scores for the choice alone (DeepSeek-V3), not to the logits
    groups_by:    the score of a group of experts: that of its best (max), or the sum of its best two (top2)"""

    scoring: str = "softmax"
    renormalizes: bool = True
    scale: float = 1.0
    bias_chooses: bool = False
    groups_by: str = "max"


DEFAULT_ROUTING = Routing()


@dataclass(frozen=True, slots=True)
class MoEFFN:
    """Routed experts of `intermediate_size`, `top_k` per token, plus shared experts seen by every token."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # all shared experts together
    shared_gate: bool = False  # a sigmoid gate on the shared expert (Qwen)
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    router_bias: bool = False
    num_groups: int = 1  # group-limited routing: top_k experts out of `top_k_groups` groups
    top_k_groups: int = 1
    latent_size: int | None = None  # experts work in a projected space of this width (Nemotron-3 Super)
    routing: Routing = DEFAULT_ROUTING


Mixer = Attention | LatentAttention | CompressedAttention | LinearAttention | GatedDeltaNet | Mamba
# Mixers whose cache grows with the context.
KEYED = (Attention, LatentAttention, CompressedAttention)
FeedForward = DenseFFN | MoEFFN


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; equal layers compare equal, so a model is a short list of (layer, how many)."""

    mixer: Mixer | None
    ffn: FeedForward | None
    formats: tuple[tuple[str, QuantizationSpec], ...] = ()  # of components that have others than the model's
