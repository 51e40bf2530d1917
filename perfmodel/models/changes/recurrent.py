"""Layers with a state of constant size instead of a KV cache."""

__all__ = ["with_linear_attention", "with_ssm_layers"]

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, LatentAttention, LinearAttention, Mamba, Mixer
from perfmodel.models.changes.rebuilt import plain_attention, with_mixers
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ModelSpec

_CACHING = ("latent", "window", "sparse", "linear")  # changes of the attention that a state would replace


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
            use_rope=mixer.use_rope,
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
