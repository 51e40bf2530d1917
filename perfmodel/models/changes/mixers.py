"""Other mixers: shared key/value heads, latents, windows with sinks, blocks; states of constant size."""

from dataclasses import replace

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, BlockSparsity, LatentAttention, LinearAttention, Mamba, Mixer
from perfmodel.models.changes.rebuilt import plain_attention, with_mixers
from perfmodel.models.model_changes import ModelChanges, SparseAttention
from perfmodel.models.spec import ModelSpec

# Blocks at the beginning that all see, and blocks drawn at random, where only the windows are given: those of BigBird's
# base models (Zaheer et al. 2020, table 8), and Longformer's without random ones.
_GLOBALS = {"bigbird": 2, "longformer": 1}
_RANDOM = {"bigbird": 3, "longformer": 0}
_CACHING = ("latent", "window", "sparse", "linear")  # changes of the attention that a state would replace


def with_kv_heads(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Query heads that share `num_kv_heads` key/value heads: MQA with 1 (Shazeer 2019), GQA (Ainslie et al. 2023)."""
    wanted = changes.num_kv_heads
    assert wanted is not None
    for mixer in plain_attention(model, "num_kv_heads"):
        if mixer.num_heads % wanted:
            raise SpecError(
                f"found {wanted} for {mixer.num_heads} query heads; each KV head serves as many, take a divisor of "
                f"{mixer.num_heads}."
            )
    return with_mixers(model, lambda m, _: replace(m, num_kv_heads=wanted) if isinstance(m, Attention) else m)


def with_latent(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Multi-head latent attention with the model's number of heads (DeepSeek-V2, 2024)."""
    latent = changes.latent
    assert latent is not None
    plain_attention(model, "latent")
    if changes.num_kv_heads is not None:
        raise SpecError("found beside num_kv_heads; a latent has no KV heads to share, leave one of them out.")

    def change(mixer: Mixer, _: int) -> Mixer:
        if not isinstance(mixer, Attention):
            return mixer
        return LatentAttention(
            num_heads=mixer.num_heads,
            q_lora_rank=latent.q_lora_rank,
            kv_lora_rank=latent.kv_lora_rank,
            qk_nope_head_dim=latent.qk_nope_head_dim or mixer.head_dim,
            qk_rope_head_dim=latent.qk_rope_head_dim,
            v_head_dim=latent.v_head_dim or mixer.v_head_dim,
        )

    return with_mixers(model, change)


def with_window(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """A sliding window in every n-th layer, the first of them included, with sinks (Xiao et al. 2023) beside it.

    Keys that left the window are overwritten: a rolling buffer of window + sinks tokens (Mistral 7B, 2023).
    """
    window, every, sinks = changes.window, changes.window_every, changes.sinks
    assert window is not None
    plain_attention(model, "window")

    def change(mixer: Mixer, place: int) -> Mixer:
        if not isinstance(mixer, Attention) or place % every:
            return mixer
        return replace(mixer, window=window, chunk=None, num_sink_tokens=sinks, is_rolling=True)

    return with_mixers(model, change)


def with_sparse_attention(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Blocks of keys instead of all (BigBird, Zaheer et al. 2020; Longformer, Beltagy et al. 2020).

    All keys are kept: another query may see those that this one does not.
    """
    sparse = changes.sparse
    assert sparse is not None
    limited = [mixer for mixer in plain_attention(model, "sparse") if mixer.span is not None]
    if limited:
        raise SpecError(
            f"found attention that already sees {limited[0].span} tokens at most; blocks choose among all, leave the "
            f"window or the blocks out."
        )
    if sparse.fraction == 1:
        return model
    sparsity = _blocks(sparse)
    return with_mixers(model, lambda m, _: replace(m, sparsity=sparsity) if isinstance(m, Attention) else m)


def _blocks(sparse: SparseAttention) -> BlockSparsity:
    first = _GLOBALS[sparse.pattern] if sparse.globals is None else sparse.globals
    drawn = _RANDOM[sparse.pattern] if sparse.random is None else sparse.random
    count = None if sparse.windows is None else sparse.windows + first + drawn
    return BlockSparsity(sparse.block, count, sparse.fraction, first, drawn)


def with_linear_attention(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Performer (Choromanski et al. 2020) or Linformer (Wang et al. 2020) in the place of softmax attention."""
    linear = changes.linear
    assert linear is not None
    plain_attention(model, "linear")
    _refuse_beside("linear attention", _CACHING[:-1], changes)

    def change(mixer: Mixer, _: int) -> Mixer:
        if not isinstance(mixer, Attention):
            return mixer
        return LinearAttention(
            kind=linear.kind,
            size=linear.size,
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            v_head_dim=mixer.v_head_dim,
            qkv_bias=mixer.qkv_bias,
            out_bias=mixer.out_bias,
            rope=mixer.rope,
        )

    return with_mixers(model, change)


def with_ssm_layers(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Mamba-2 (Dao and Gu 2024) for attention, all of it or all but every n-th layer (Jamba, 2024)."""
    ssm = changes.ssm_layers
    assert ssm is not None
    if not any(isinstance(layer.mixer, Attention | LatentAttention) for layer, _ in model.layers):
        raise SpecError(f"found {model.name}, which has no attention to replace; take another model or leave it out.")
    inner = ssm.expand * model.hidden_size
    if inner % ssm.head_dim or (inner // ssm.head_dim) % ssm.num_groups:
        raise SpecError(
            f"found head_dim={ssm.head_dim} and num_groups={ssm.num_groups} for an inner width of {inner}; take a "
            f"head_dim that divides it, and num_groups that divides the heads."
        )
    if ssm.attention_every is None:
        _refuse_beside("no attention at all", _CACHING, changes)
    mamba = Mamba(
        num_heads=inner // ssm.head_dim,
        head_dim=ssm.head_dim,
        state_size=ssm.state_size,
        num_groups=ssm.num_groups,
        conv_kernel=ssm.conv_kernel,
        chunk_size=ssm.chunk_size,
    )

    def change(mixer: Mixer, place: int) -> Mixer:
        is_kept = ssm.attention_every is not None and (place + 1) % ssm.attention_every == 0
        return mamba if isinstance(mixer, Attention | LatentAttention) and not is_kept else mixer

    return with_mixers(model, change)


def _refuse_beside(what: str, names: tuple[str, ...], changes: ModelChanges) -> None:
    found = [name for name in names if getattr(changes, name) is not None]
    if found:
        raise SpecError(f"found {', '.join(found)} beside {what}, which leaves nothing of it; leave one of them out.")
