"""Small models for the executor's tests, one feature each."""

__all__ = ["MODELS", "attention", "tiny"]

from dataclasses import replace

from perfmodel.models.architecture import Attention, DenseFFN, FeedForward, Layer, MoEFFN, Rope
from perfmodel.models.spec import ModelSpec


def attention(**changes: object) -> Attention:
    """4 query heads over 2 KV heads of 8."""
    plain = Attention(num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, rope=Rope(500.0))
    return replace(plain, **changes)  # type: ignore[arg-type]


def tiny(*layers: tuple[Attention, FeedForward], **changes: object) -> ModelSpec:
    """A model of the given layers, 32 wide with 101 tokens."""
    spec = ModelSpec(
        name="test-model",
        model_type="unknown",
        hidden_size=32,
        vocab_size=101,
        max_position_embeddings=256,
        norm_eps=1e-3,
        layers=tuple((Layer(mixer, ffn), 1) for mixer, ffn in layers),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


_DENSE = DenseFFN(intermediate_size=48)
_MOE = MoEFFN(num_experts=6, top_k=2, intermediate_size=24)

MODELS = {
    "gqa": tiny((attention(), _DENSE), (attention(), _DENSE)),
    "window": tiny((attention(window=9), _DENSE), (attention(), _DENSE)),
    "chunks": tiny((attention(chunk=12), _DENSE), (attention(rope=None), _DENSE)),
    "moe": tiny((attention(), _DENSE), (attention(), _MOE)),
    "shared-experts": tiny(
        (attention(), replace(_MOE, shared_intermediate_size=16, shared_gate=True)), tie_word_embeddings=True
    ),
    "qk-norm-bias-gate": tiny(
        (attention(qk_norm=True, qkv_bias=True, out_bias=True, output_gate=True), DenseFFN(40, bias=True)),
        (attention(v_head_dim=6), DenseFFN(40, gated=False, activation="gelu")),
    ),
}
