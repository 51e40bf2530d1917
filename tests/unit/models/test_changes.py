"""Each change of a model against counts derived by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfmodel.cost.memory.footprint import kv_bytes_per_token, state_bytes_per_sequence
from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention
from perfmodel.models.changes import CHANGES, kept_layers
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.models.spec import ChangedFrom, ModelSpec
from perfmodel.ops.sharding import Sharding
from perfmodel.specs import load_model

# Llama-3.1-8B: d 4096, 32 heads of 128, 8 KV heads, feed-forward 14336, 32 layers, vocabulary 128256.
D, HEADS, HEAD, KV, WIDTH, LAYERS, VOCABULARY = 4096, 32, 128, 8, 14336, 32, 128256
LLAMA = "llama-3.1-8b"


def changed(name: str = LLAMA, **fields: Any) -> ModelSpec:
    model, changes = load_model(name), ModelChanges.model_validate(fields)
    for field, change in CHANGES.items():
        if getattr(changes, field) is not None:
            model = change(model, changes)
    return model


def kv_bytes(model: ModelSpec) -> float:
    return kv_bytes_per_token(model, Sharding(), list(model.iter_layers()))


def params(model: ModelSpec) -> int:
    return count_parameters(model).total


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": KV},
        {"sparse": {"fraction": 1.0}},
        {"prune": {"kind": "unstructured", "fraction": 0.9}},  # zeros that are stored cost what other weights do
        {"prune": {"kind": "structured", "fraction": 0.0}},
        {"share_layers": LAYERS},
        {"tie_embeddings": False},
    ],
)
def test_a_change_that_changes_nothing_gives_the_same_model(fields: dict[str, Any]) -> None:
    assert changed(**fields) == load_model(LLAMA)


@pytest.mark.parametrize("heads", [1, 2, 4, 16, 32])
def test_kv_heads_scale_the_cache_and_two_projections(heads: int) -> None:
    """Cache 2 L K h b; parameters change by 2 L d h (K' - K)."""
    model = changed(num_kv_heads=heads)
    assert kv_bytes(model) == 2 * LAYERS * heads * HEAD * 2
    assert params(model) - params(load_model(LLAMA)) == 2 * LAYERS * D * HEAD * (heads - KV)


def test_a_latent_is_cached_once_for_all_heads() -> None:
    """(512 + 64) 2 B a layer and token: 576 elements instead of 2048, as DeepSeek-V2 counts 4.5 head pairs."""
    model = changed(latent={"kv_lora_rank": 512})
    assert kv_bytes(model) == LAYERS * 576 * 2
    per_layer = D * HEADS * (HEAD + 64) + D * 576 + 512 * HEADS * 2 * HEAD + HEADS * HEAD * D
    assert count_parameters(model).stored["attention"] == LAYERS * per_layer


def test_a_window_in_every_second_layer() -> None:
    model = changed(window=1024, window_every=2, sinks=4)
    assert model.attention_spans == (1028,)
    limited = [layer.mixer.span for layer in model.iter_layers()]  # type: ignore[union-attr]
    assert limited == [1028, None] * (LAYERS // 2)
    assert model.rolling_span is None
    assert changed(window=1024, sinks=4).rolling_span == 1028
    layer = next(load_model(LLAMA).iter_layers())
    assert isinstance(layer.mixer, Attention)
    rolling = [(replace(layer, mixer=replace(layer.mixer, window=n, is_rolling=True)), 1) for n in (64, 512, 128)]
    assert replace(load_model(LLAMA), layers=tuple(rolling)).rolling_span == 512


def test_blocks_make_a_span() -> None:
    """BigBird's 3 windows, 2 globals and 3 random blocks of 64 are 512 keys; its base model's figures."""
    assert changed(sparse={"windows": 3}).attention_spans == (512,)
    assert changed(sparse={"pattern": "longformer", "windows": 4, "block": 128}).attention_spans == (5 * 128,)
    assert kv_bytes(changed(sparse={"windows": 3})) == kv_bytes(load_model(LLAMA))  # all is kept


@pytest.mark.parametrize(("kind", "columns"), [("performer", HEAD + 1), ("linformer", 2 * HEAD)])
def test_linear_attention_has_a_state_instead_of_a_cache(kind: str, columns: int) -> None:
    """fp32 rows of sums of values and of keys (Performer), or of keys and values (Linformer), per KV head."""
    model = changed(linear={"kind": kind, "size": 256})
    assert kv_bytes(model) == 0
    state = state_bytes_per_sequence(model, Sharding(), list(model.iter_layers()))
    assert state == LAYERS * KV * 256 * columns * 4


def test_every_eighth_layer_keeps_its_attention() -> None:
    model = changed(ssm_layers={"attention_every": 8})
    assert kv_bytes(model) == kv_bytes(load_model(LLAMA)) / 8
    assert [type(layer.mixer).__name__ for layer in model.iter_layers()].index("Attention") == 7


def test_mamba_in_all_layers_has_no_cache() -> None:
    """Inner width 2 d in heads of 64, state 128: d (2 D + 2 N + H) in, D d out, convolution, 3 H, and the norm's D."""
    model = changed(ssm_layers={})
    assert kv_bytes(model) == 0
    inner = 2 * D
    heads, conv = inner // 64, inner + 2 * 128
    per_layer = D * (inner + conv + heads) + conv * 5 + 3 * heads + inner * D
    assert count_parameters(model).stored["linear_attention"] == LAYERS * per_layer


def test_structured_pruning_leaves_whole_tiles_and_whole_groups() -> None:
    """A quarter of 8 KV heads is two, with 4 query heads each; 14336 / 4 * 3 = 10752 is 84 tiles of 128."""
    model = changed(prune={"kind": "structured", "fraction": 0.25})
    attention = D * HEAD * (24 + 2 * 6) + 24 * HEAD * D
    assert count_parameters(model).stored["attention"] == LAYERS * attention
    assert count_parameters(model).stored["dense_ffn"] == LAYERS * 3 * D * 10752
    odd = changed(prune={"kind": "structured", "fraction": 0.3}).layers[0][0]
    assert odd.ffn.intermediate_size == 79 * 128  # type: ignore[union-attr]  # 10035.2 rounded up
    assert isinstance(odd.mixer, Attention)
    assert (odd.mixer.num_kv_heads, odd.mixer.num_heads) == (6, 24)  # 5.6 rounded up, 4 query heads for each


def test_dropped_layers_are_gone_with_their_cache() -> None:
    model = changed(prune={"kind": "layers", "fraction": 0.25})
    assert model.num_layers == 24
    assert kv_bytes(model) == kv_bytes(load_model(LLAMA)) * 0.75
    windowed = changed(window=64, window_every=2, prune={"kind": "layers", "fraction": 0.5})
    assert [count for _, count in windowed.layers] == [1] * 16  # of both kinds as many
    assert kept_layers(list(load_model(LLAMA).iter_layers()), 0.5) == list(range(0, LAYERS, 2))  # evenly spaced


def test_two_of_four_weights_are_nine_sixteenths_of_the_bytes() -> None:
    """Half of the 16-bit values and 2 bits for each of them: (8 + 1) / 16 = 0.5625; of 8 bits (4 + 1) / 8 = 0.625."""
    dense, sparse = (weight_bytes(model) for model in (load_model(LLAMA), changed(prune={"kind": "2:4"})))
    for name in ("attention", "dense_ffn"):
        assert sparse[name] == 0.5625 * dense[name]
    for name in ("embedding", "lm_head", "norms"):
        assert sparse[name] == dense[name]


def test_stored_indices_pay_from_half_of_the_weights_on() -> None:
    """(1 - f) (2 + 2) bytes for 2: half of them at 0.75, none saved at 0.5."""
    dense = weight_bytes(load_model(LLAMA))["dense_ffn"]
    for fraction, share in ((0.5, 1.0), (0.75, 0.5)):
        model = changed(prune={"kind": "unstructured", "fraction": fraction, "storage": "sparse"})
        assert weight_bytes(model)["dense_ffn"] == share * dense


def test_a_rank_stands_for_two_thin_matrices() -> None:
    """r (in + out) for q, k, v together, o, gate and up together, and down."""
    model = changed(low_rank={"rank": 512})
    stored = count_parameters(model).stored
    assert stored["attention"] == LAYERS * 512 * ((D + 6144) + (D + D))
    assert stored["dense_ffn"] == LAYERS * 512 * ((D + 2 * WIDTH) + (WIDTH + D))
    half = count_parameters(changed(low_rank={"fraction": 0.5})).stored["dense_ffn"]
    assert half == pytest.approx(0.5 * LAYERS * 3 * D * WIDTH, rel=1e-3)


def test_shared_layers_are_stored_once_and_multiplied_each_time() -> None:
    """ALBERT: one layer's weights, all layers' work."""
    base, model = count_parameters(load_model(LLAMA)), count_parameters(changed(share_layers=4))
    assert model.stored["dense_ffn"] == base.stored["dense_ffn"] / 8
    assert model.active == base.active


def test_tied_embeddings_save_one_table() -> None:
    assert params(load_model(LLAMA)) - params(changed(tie_embeddings=True)) == VOCABULARY * D


def test_experts_split_the_block_and_a_router_chooses() -> None:
    """The same weights and a router of d E per layer; k of E are multiplied."""
    base, model = count_parameters(load_model(LLAMA)), count_parameters(changed(moefy={"num_experts": 16, "top_k": 4}))
    assert model.stored["experts"] == base.stored["dense_ffn"]
    assert model.stored["router"] == LAYERS * D * 16
    assert model.active_by_component["experts"] == base.active_by_component["dense_ffn"] / 4


def test_finer_experts_are_the_same_weights_and_the_same_per_token() -> None:
    base = count_parameters(load_model("mixtral-8x7b"))
    model = count_parameters(changed("mixtral-8x7b", experts={"split": 4}))
    assert model.stored["experts"] == base.stored["experts"]
    assert model.active_by_component["experts"] == base.active_by_component["experts"]
    assert model.stored["router"] == 4 * base.stored["router"]


def test_fewer_experts_per_token_leave_the_weights_and_multiply_fewer() -> None:
    base = count_parameters(load_model("mixtral-8x7b"))
    model = count_parameters(changed("mixtral-8x7b", experts={"top_k": 1}))
    assert model.total == base.total
    assert model.active_by_component["experts"] == base.active_by_component["experts"] / 2


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        (LLAMA, {"num_kv_heads": 5}, "divisor of 32"),
        ("deepseek-v3", {"num_kv_heads": 8}, "LatentAttention"),
        ("deepseek-v3", {"window": 4096}, "LatentAttention"),
        (LLAMA, {"num_kv_heads": 1, "latent": {"kv_lora_rank": 512}}, "num_kv_heads"),
        (LLAMA, {"window": 64, "sparse": {"fraction": 0.5}}, "sees 64 tokens"),
        (LLAMA, {"window": 64, "linear": {"kind": "performer"}}, "window"),
        (LLAMA, {"window": 64, "ssm_layers": {}}, "window"),
        (LLAMA, {"ssm_layers": {"head_dim": 100}}, "head_dim=100"),
        (LLAMA, {"prune": {"kind": "layers", "fraction": 0.99}}, "leaves none of 32 layers"),
        (LLAMA, {"low_rank": {"rank": 5000}}, "at most 4096"),
        ("mixtral-8x7b", {"moefy": {"num_experts": 4, "top_k": 1}}, "no dense"),
        (LLAMA, {"experts": {"top_k": 1}}, "no mixture of experts"),
        ("mixtral-8x7b", {"experts": {"top_k": 9}}, "top_k=9 of 8"),
        ("mixtral-8x7b", {"experts": {"split": 3}}, "divisor of 14336"),
        (LLAMA, {"moefy": {"num_experts": 5, "top_k": 1}}, "divisor of 14336"),
        (LLAMA, {"window": 64, "window_every": 2, "share_layers": 3}, "of another kind"),
        (LLAMA, {"share_layers": 33}, "at most 32"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(name: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says) as refusal:
        changed(name, **fields)
    assert "\n" not in str(refusal.value)


def test_each_change_has_its_page() -> None:
    folder = Path(__file__).resolve().parents[3] / "docs" / "techniques"
    pages = [page.read_text() for page in folder.glob("*.md") if page.name != "README.md"]
    for field in CHANGES:
        own = [page for page in pages if f"model_changes: {{{field}: " in page]
        assert len(own) == 1, field
        for part in ("**Switch.**", "**Formula.**", "**Source.**", "**Valid** ", "**Not modelled.**"):
            assert part in own[0], (field, part)


def test_a_changed_models_weights_are_made_of_the_file_of_its_original() -> None:
    original = replace(load_model(LLAMA), weights_path="there.safetensors")
    made = replace(original, weights_path=None, changed_from=ChangedFrom(original, ModelChanges()))
    assert original.weights_origin == made.weights_origin == "there.safetensors"
    assert load_model(LLAMA).weights_origin is None
