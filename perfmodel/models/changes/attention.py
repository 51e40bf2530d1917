"""Other attention: shared key/value heads, latents, windows with sinks, blocks."""

__all__ = ["with_kv_heads", "with_latent", "with_sparse_attention", "with_window"]

from dataclasses import replace

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, BlockSparsity, LatentAttention, Mixer
from perfmodel.models.changes.rebuilt import plain_attention, with_mixers
from perfmodel.models.model_changes import ModelChanges, SparseAttention
from perfmodel.models.spec import ModelSpec

# Blocks at the beginning that all see, and blocks drawn at random, where only the windows are given: those of BigBird's
# base models (Zaheer et al. 2020, table 8), and Longformer's without random ones.
_GLOBALS = {"bigbird": 2, "longformer": 1}
_RANDOM = {"bigbird": 3, "longformer": 0}


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
