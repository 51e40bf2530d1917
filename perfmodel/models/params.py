"""How many parameters a model has, component by component, and how many bytes they take.

Every count is a closed form in the sizes of `architecture.py`; symbols: d hidden size, H query heads, K key/value
heads, h head size, f intermediate size, E experts, k experts per token, V vocabulary. Biases are counted with the
matrix they belong to, all norm weights under "norms"."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.models import architecture as arch
from perfmodel.models.architecture import KEYED, Attention, DenseFFN, LatentAttention, Layer, MoEFFN
from perfmodel.models.number_formats import bytes_per_weight, component_bytes
from perfmodel.models.spec import COMPONENTS, ModelSpec

# The linear layers that weight sparsity leaves weights out of.
SPARSE_COMPONENTS = frozenset({"attention", "linear_attention", "dense_ffn", "experts", "shared_experts"})


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by component.

    stored: what the checkpoint holds; a tied LM head is stored once, under "embedding"
    active: what one token multiplies with: k of E experts, the LM head (also when tied), no embedding row"""

    stored: Mapping[str, int]
    active_by_component: Mapping[str, int]

    @property
    def total(self) -> int:
        """All stored parameters of the text decoder (no vision tower, no multi-token-prediction layers)."""
        return sum(self.stored.values())

    @property
    def active(self) -> int:
        """Parameters used per token, counted as gpt-oss and DeepSeek count theirs: without the embedding table."""
        return sum(self.active_by_component.values())

    @property
    def embedding(self) -> int:
        return self.stored["embedding"]

    @property
    def lm_head(self) -> int:
        return self.stored["lm_head"]

    def __str__(self) -> str:
        rows = [f"{name:<17}{count:>20,}" for name, count in self.stored.items() if count]
        return "\n".join([*rows, f"{'total':<17}{self.total:>20,}", f"{'active per token':<17}{self.active:>20,}"])


def count_parameters(model: ModelSpec) -> ParameterCount:
    """Exact parameter counts of the text decoder.

    total = V d (embedding) + V d (LM head, unless tied) + d (final norm) + sum over layers; Llama-2-7B:
    2 * 32000 * 4096 + 4096 + 32 * (4 * 4096^2 + 3 * 4096 * 11008 + 2 * 4096) = 6,738,415,616."""
    d, vocab = model.hidden_size, model.vocab_size
    stored = dict.fromkeys(COMPONENTS, 0)
    active = dict.fromkeys(COMPONENTS, 0)
    for layer in list(model.iter_layers())[: model.num_distinct_layers]:
        for name, params in layer_parameters(model, layer).items():
            stored[name] += params
    for layer, count in model.layers:
        for name, params in layer_parameters(model, layer).items():
            if name == "experts" and isinstance(layer.ffn, MoEFFN):
                params = params * min(layer.ffn.top_k, layer.ffn.num_experts) // layer.ffn.num_experts
            active[name] += params * count
    head_bias = vocab if model.lm_head_bias else 0
    stored["embedding"] += (vocab + model.num_learned_positions) * d
    if model.pooling is not None:
        stored["lm_head"] = active["lm_head"] = classifier_parameters(model)
    else:
        stored["lm_head"] += (0 if model.tie_word_embeddings else vocab * d) + head_bias
        active["lm_head"] += vocab * d + head_bias
    for counts in (stored, active):
        counts["norms"] += final_norms(model)
    return ParameterCount(stored, active)


def classifier_parameters(model: ModelSpec) -> int:
    """In place of an LM head, what makes c scores of a pooled state: d c, in encoders with biases, behind a layer of
    d (d + 1); 0 for a model that returns the state itself."""
    d, count = model.hidden_size, model.num_labels
    return (d + 1) * (d + count) if count and model.is_encoder else d * count


def final_norms(model: ModelSpec) -> int:
    """Parameters of the last norm, and of what makes one of several hidden states before it."""
    d, n = model.hidden_size, model.num_streams
    return _norm_width(model) + (n * (n * d + 1) + 1 if n > 1 else 2 * d if model.residual_block else 0)


def layer_parameters(model: ModelSpec, layer: Layer) -> dict[str, int]:
    """Parameters of one layer by component; only components that the layer has.

    Norms: one of d per block (two with norms before and after it, one in all where the blocks share it), LayerNorms
    with a bias twice that, and the mixer's own (q/k norms, MLA's latent norms, the gated norm of a scan). With them the
    weights of residual streams: per block of n streams a projection n*d*(n^2+2n), its bias and 3 scales; a norm and a
    query of d each for attention to the sums of earlier layers."""
    d, mixer, ffn = model.hidden_size, layer.mixer, layer.ffn
    counts: dict[str, int] = {}
    num_blocks = (mixer is not None) + (ffn is not None)
    num_norms = num_blocks * (model.pre_norms + model.post_norms)
    if model.shared_block_norm:
        num_norms = min(num_norms, 1)
    norms = num_norms * _norm_width(model)
    if model.num_streams > 1:
        norms += num_blocks * ((model.num_streams + 2) * model.num_streams * (model.num_streams * d + 1) + 3)
    elif model.residual_block:
        norms += num_blocks * 2 * d
    if mixer is not None:
        name = "attention" if isinstance(mixer, KEYED) else "linear_attention"
        counts[name], own_norms = _MIXERS[type(mixer)](mixer, d)
        norms += own_norms
    if isinstance(ffn, DenseFFN):
        counts["dense_ffn"] = _ffn(d, ffn.intermediate_size, ffn.gated, ffn.bias, ffn.up_rank, ffn.down_rank)
    elif isinstance(ffn, MoEFFN):
        counts |= _moe(ffn, d)
    return counts | {"norms": norms}


def weight_bytes(model: ModelSpec) -> dict[str, float]:
    """Bytes of the stored weights by component, before sharding; `extra_params` (a vision tower) is not in them.

    Components that the quantization keeps, and norms always, are in the model's dtype; the others in its format with
    their share of the group scales, and those of sparse linear layers with their indices. Biases and convolutions go
    with their component (less than 0.1 % of it)."""
    sizes = {
        name: count * sparse_bytes(model, name, stored_bytes(model, name))
        for name, count in count_parameters(model).stored.items()
    }
    for layer, count in model.layers:
        params = layer_parameters(model, layer)
        for name, _ in layer.formats:
            own, common = (sparse_bytes(model, name, stored_bytes(model, name, of)) for of in (layer, None))
            sizes[name] += count * params[name] * (own - common)
    return sizes


def stored_bytes(model: ModelSpec, component: str, layer: Layer | None = None) -> float:
    """Bytes of a stored weight of `component`, in `layer` where that has a format of its own."""
    own = dict(layer.formats).get(component) if layer is not None else None
    quantization = own or model.quantization
    if quantization.weights is None or component in quantization.kept or component == "norms":
        return bytes_per_weight(model.dtype)
    return component_bytes(quantization, component)


def sparse_bytes(model: ModelSpec, component: str, per_weight: float) -> float:
    """Bytes of a weight of `component`, those left out included: density (w + index), or w in what stays dense."""
    sparsity = model.weight_sparsity
    if sparsity is None or component not in SPARSE_COMPONENTS:
        return per_weight
    return sparsity.density * (per_weight + sparsity.index_bits / 8)


def _norm_width(model: ModelSpec) -> int:
    return model.hidden_size * (2 if model.norm_bias else 1)


def _matrix(num_in: int, num_out: int, rank: int | None) -> int:
    """in*out, or r*(in + out) where it is a product of two."""
    return num_in * num_out if rank is None else rank * (num_in + num_out)


# Each gives the parameters of a mixer, and those of the norms in it.


def _attention(m: Attention, d: int) -> tuple[int, int]:
    """q d*H*h (plus a gate d*H*h_v), k d*K*h, v d*K*h_v, o H*h_v*d; biases as wide as their outputs; H sinks. An
    indexer of blocks: q d*H_i*h_i, k d*h_i, and a norm of each."""
    q = m.num_heads * m.head_dim + (m.num_heads * m.v_head_dim if m.output_gate else 0)
    qkv = q + m.num_kv_heads * (m.head_dim + m.v_head_dim)
    out = m.num_heads * m.v_head_dim
    biases = (qkv if m.qkv_bias else 0) + (d if m.out_bias else 0)
    heads = {"head": 2, "all_heads": m.num_heads + m.num_kv_heads, "none": 0}[m.qk_norm_width]
    inputs = _matrix(d, qkv, m.qkv_rank) if m.q_rank is None else _matrix(d, q, m.q_rank) + d * (qkv - q)
    params = inputs + _matrix(out, d, m.out_rank) + biases + (m.num_heads if m.sinks else 0)
    index = m.indexer
    if index is None:
        return params, (heads * m.head_dim if m.qk_norm else 0) + (m.q_rank or 0)
    return params + d * (index.num_heads + 1) * index.head_dim, heads * m.head_dim * m.qk_norm + 2 * index.head_dim


def _linear_attention(m: arch.LinearAttention, d: int) -> tuple[int, int]:
    """As `_attention`, and the projections per KV head: Performer's features, m*h; Linformer's positions, r*r.

    Linformer projects all positions of a context; a decoder that cannot see them ahead has them in periods of r."""
    qkv = m.num_heads * m.head_dim + m.num_kv_heads * (m.head_dim + m.v_head_dim)
    out = m.num_heads * m.v_head_dim
    biases = (qkv if m.qkv_bias else 0) + (d if m.out_bias else 0)
    projection = m.num_kv_heads * m.size * (m.head_dim if m.kind == "performer" else m.size)
    return d * qkv + out * d + biases + projection, 0


def _latent_attention(m: LatentAttention, d: int) -> tuple[int, int]:
    """MLA: q_a d*r_q and q_b r_q*H*(n+r) (or q d*H*(n+r)), kv_a d*(r_kv+r), kv_b r_kv*H*(n+v), o H*v*d.

    n, r, v: no-position, rotary and value head sizes; r_q, r_kv: ranks. The indexer adds q r_q*H_i*h_i, k d*h_i, and
    one weight per head d*H_i; its norm is a LayerNorm with a bias."""
    q_dim = m.num_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    query_input = m.q_lora_rank or d
    q = query_input * q_dim + (d * m.q_lora_rank if m.q_lora_rank else 0)
    kv_a = d * (m.kv_lora_rank + m.qk_rope_head_dim)
    kv_b = m.kv_lora_rank * m.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
    params = q + kv_a + kv_b + m.num_heads * m.v_head_dim * d * (2 if m.output_gate else 1)
    norms = (m.q_lora_rank or 0) + m.kv_lora_rank
    if m.indexer is not None and not m.indexer.is_shared:
        i = m.indexer
        params += query_input * i.num_heads * i.head_dim + d * i.head_dim + d * i.num_heads
        norms += 2 * i.head_dim
    return params, norms


def _compressed_attention(m: arch.CompressedAttention, d: int) -> tuple[int, int]:
    """q_a d*r_q, q_b r_q*H*h, kv d*h, o_a H*h*r_o, o_b g*r_o*d, H sinks. Each of c overlapping compressors adds key and
    weight 2*d*c*h and the weight's positions ratio*c*h; the indexer its own, q r_q*H_i*h_i and weights d*H_i."""
    h, i, c = m.head_dim, m.indexer, m.num_overlapping
    params = d * (m.q_lora_rank + h) + m.q_lora_rank * m.num_heads * h + m.num_heads * (h * m.o_lora_rank + 1)
    params += m.o_groups * m.o_lora_rank * d + c * h * (2 * d + m.ratio)
    norms = m.q_lora_rank + h + (h if m.ratio else 0)
    if i is not None:
        params += i.num_heads * (m.q_lora_rank * i.head_dim + d) + c * i.head_dim * (2 * d + m.ratio)
        norms += i.head_dim
    return params, norms


def _gated_delta_net(m: arch.GatedDeltaNet, d: int) -> tuple[int, int]:
    """q, k, v d*(2*D_k + D_v) and gate z d*D_v; a and b 2*d*H_v; convolution over q, k, v; A and dt 2*H_v; out D_v*d.
    Through ranks r: a decay per key channel r*(d + D_k) with D_k dt, and a gate r*(d + D_v)."""
    key_dim = m.num_key_heads * m.key_head_dim
    value_dim = m.num_value_heads * m.value_head_dim
    projections = d * (2 * key_dim + value_dim + m.num_value_heads) + _matrix(d, value_dim, m.gate_rank)
    decays = (d + 1) * m.num_value_heads if m.decay_rank is None else _matrix(d, key_dim, m.decay_rank) + key_dim
    convolution = (2 * key_dim + value_dim) * m.conv_kernel
    return projections + decays + convolution + m.num_value_heads + value_dim * d, m.value_head_dim


def _mamba(m: arch.Mamba, d: int) -> tuple[int, int]:
    """Mamba-2: in d*(2 D + 2 G N + H), convolution over D + 2 G N, A, D and dt per head, out D*d; a norm of D.

    Mamba-1 (dt_rank R): in d*2D, convolution over D, x D*(R+2N), dt R*D + D, A D*N, skip D, out D*d; with norms (Jamba)
    they are on dt, B and C."""
    inner = m.num_heads * m.head_dim
    if m.dt_rank is not None:
        conv_dim, in_dim, norms = inner, 2 * inner, m.dt_rank + 2 * m.state_size
        scan = inner * (m.dt_rank + 2 * m.state_size) + (m.dt_rank + 1) * inner + inner * m.state_size + inner
    else:
        conv_dim = inner + 2 * m.num_groups * m.state_size
        in_dim, norms = inner + conv_dim + m.num_heads, inner
        scan = 3 * m.num_heads
    conv = conv_dim * (m.conv_kernel + (1 if m.conv_bias else 0))
    biases = in_dim + d if m.proj_bias else 0
    return d * in_dim + conv + scan + inner * d + biases, norms if m.inner_norm else 0


_MIXERS: Mapping[type[arch.Mixer], Callable[[Any, int], tuple[int, int]]] = {
    Attention: _attention,
    LatentAttention: _latent_attention,
    arch.CompressedAttention: _compressed_attention,
    arch.LinearAttention: _linear_attention,
    arch.GatedDeltaNet: _gated_delta_net,
    arch.Mamba: _mamba,
}


def _ffn(
    d: int, intermediate: int, gated: bool, bias: bool, up_rank: int | None = None, down_rank: int | None = None
) -> int:
    """3*d*f gated (gate, up, down), 2*d*f plain (up, down), or of gate and up together and of down the products of two;
    biases f per input matrix and d."""
    ups = intermediate * (2 if gated else 1)
    return _matrix(d, ups, up_rank) + _matrix(intermediate, d, down_rank) + (ups + d if bias else 0)


def _moe(m: MoEFFN, d: int) -> dict[str, int]:
    """Router d*E (+E), experts E*ffn(f), shared experts ffn(f_shared) (+d for their gate).

    Experts that work in a latent space of width l are ffn on l; the two projections d*l and l*d, which every token
    passes, count with the shared experts."""
    width = m.latent_size or d
    shared = _ffn(d, m.shared_intermediate_size, m.gated, False) + 2 * d * (m.latent_size or 0)
    if m.shared_gate and m.shared_intermediate_size:
        shared += d
    counts = {
        "router": d * m.num_experts + (m.num_experts if m.router_bias else 0),
        "experts": m.num_experts * _ffn(width, m.intermediate_size, m.gated, m.bias),
    }
    if shared:
        counts["shared_experts"] = shared
    return counts
