"""config.json: old and new field names, patterns of layers, and one sentence for what cannot be read."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir
from perfmodel.models import load_model
from perfmodel.models.architecture import Attention, DenseFFN, GatedDeltaNet, LatentAttention, Layer, Mamba, MoEFFN
from perfmodel.models.cards import load_card
from perfmodel.models.hf.config import load_config, model_from_config
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

SCENARIO = "llama-3.1-8b-a100"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}


def card_config(name: str) -> dict[str, Any]:
    return copy.deepcopy(load_card(data_dir("models") / f"{name}.yaml").config)


def layers(config: dict[str, Any], **changes: Any) -> list[Layer]:
    return list(model_from_config(config | changes, "x").iter_layers())


def test_old_and_new_field_names_mean_the_same() -> None:
    new = {key: value for key, value in LLAMA.items() if key not in ("torch_dtype", "rope_theta")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "head_dim": None}
    assert model_from_config(new, "x") == model_from_config(LLAMA, "x")


def test_the_number_of_experts_has_three_names() -> None:
    config = card_config("qwen3-30b-a3b")
    count = config.pop("num_experts")
    models = {
        model_from_config(config | {name: count}, "x")
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    }
    assert len(models) == 1


def test_a_nested_text_part_is_the_model() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    nested = {"model_type": "some_vl", "text_config": text, "tie_word_embeddings": True, "vision_config": {"depth": 2}}
    model = model_from_config(nested, "x")
    assert model.other_inputs == ("images",)
    assert replace(model, other_inputs=()) == model_from_config(LLAMA | {"tie_word_embeddings": True}, "x")
    assert model_from_config(nested | {"vocab_size": 7}, "x") == model  # the text part's own goes before


def test_unknown_model_types_and_fields_load() -> None:
    strange = LLAMA | {"model_type": "brand-new", "flux_capacitor": {"gigawatts": 1.21}, "id2label": {"0": "x"}}
    assert layers(strange) == layers(LLAMA)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_missing_field_is_one_sentence(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(SpecError, match=rf"^some/config\.json: {name}.* is missing[^\n]*\.$"):
        model_from_config(config, "x", source="some/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size: got 'wide'; expected a whole number"),
        ({"num_hidden_layers": -3}, "num_hidden_layers: got -3"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: got 5, which does not divide"),
        ({"num_attention_heads": 33}, "head_dim is missing"),
        ({"torch_dtype": "float17"}, "dtype: got 'float17'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, but num_hidden_layers is 32"),
        ({"layer_types": ["conv"] * 32}, "layer_types: got 'conv', which is not modelled"),
        ({"num_local_experts": 8}, "num_experts_per_tok or .* is missing"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok: got 9, but there are 8"),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: got 'MX'"),
        ({"block_configs": [{"attention": {}}]}, "block_configs: got"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: an embedding for each layer"),
        ({"quantization_config": {"quant_method": "abacus"}}, "quant_method: got 'abacus'"),
        ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings: got 'maybe'"),
    ],
)
def test_a_wrong_value_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        model_from_config(LLAMA | changes, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "is_encoder_decoder": True, "d_model": 512, "vocab_size": 32128, "num_layers": 6},
        {"model_type": "distilbert", "dim": 768, "vocab_size": 30522, "n_layers": 6},
        {"model_type": "electra", "architectures": ["ElectraForMaskedLM"], "vocab_size": 30522},
        {"model_type": "clip", "text_config": {"model_type": "clip_text_model", "vocab_size": 49408}},
        {"model_type": "dinov2", "hidden_size": 768, "num_hidden_layers": 12, "patch_size": 14},
        {"model_type": "whisper", "is_encoder_decoder": True, "vocab_size": 51865},
    ],
    ids=lambda config: config["model_type"],
)
def test_models_that_are_no_text_decoders_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"decoder|text model"):
        model_from_config(config, "x")


def test_files_that_are_no_config_are_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(SpecError, match="not valid JSON"):
        load_model(broken)
    broken.write_text("[1, 2]")
    with pytest.raises(SpecError, match="expected a JSON object"):
        load_model(tmp_path)
    with pytest.raises(SpecError):
        load_config(tmp_path / "absent.json")


def test_a_folder_with_a_config_is_called_as_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(folder).name == "my-llama"
    found, card = load_model(str(folder)), load_model("llama-3.1-8b")
    assert count_parameters(found) == count_parameters(card)


def test_modelopt_settings_in_their_own_file_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    quantization = load_model(tmp_path).quantization
    assert (quantization.weights, quantization.activations, quantization.kv_cache) == ("fp8", "fp8", "fp8")


def test_a_name_that_ends_with_a_format_says_it_where_no_file_does(tmp_path: Path) -> None:
    """ModelOpt's formats are in a file of their own, which people leave behind; never BF16 in silence."""
    for name, expected in (("X-8B-NVFP4", "nvfp4"), ("X-8B-FP8", "fp8"), ("Qwen--X-8B-FP8", "fp8"), ("X-8B", None)):
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(LLAMA))
        for model in (load_model(path), load_model(path.parent)):
            assert (model.quantization.weights, model.has_format_by_name) == (expected, expected is not None)
        (tmp_path / f"org--{name}.json").write_text(json.dumps(LLAMA))
        assert load_model(tmp_path / f"org--{name}.json").quantization.weights == expected
    few = ["traffic.num_requests=2", "hardware=b200-sxm", f"model={tmp_path}/X-8B-NVFP4"]
    assert any("by the name of the checkpoint alone" in n for n in simulate(load_scenario(SCENARIO, few)).notes)
    given = [*few, "engine.quantization=fp8"]
    assert not any("by the name" in n for n in simulate(load_scenario(SCENARIO, given)).notes)
    said = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "X-8B-NVFP4" / "config.json").write_text(json.dumps(said))
    assert load_model(tmp_path / "X-8B-NVFP4").quantization.weights == "fp8"


@pytest.mark.parametrize(
    ("dtypes", "expected"), [(("BF16", "BF16"), None), (("F8_E4M3", "F32"), "fp8"), (("U8", "F8_E4M3"), "nvfp4")]
)
def test_weights_beside_a_config_say_their_format(
    tmp_path: Path, dtypes: tuple[str, str], expected: str | None
) -> None:
    """The header says it before a name does; a download that was cut off says nothing."""
    path = tmp_path / "X-8B-INT8" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    matrix, scale = ({"dtype": dtype, "shape": [8, 8], "data_offsets": [0, 1]} for dtype in dtypes)
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_2")
    header = json.dumps({names[0]: {**matrix, "shape": [64, 64]}, names[1]: {**scale, "shape": []}}).encode()
    weights = path.with_name("model.safetensors")
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    for place in (path, path.parent, weights):
        model = load_model(place)
        assert (model.quantization.weights, model.has_format_by_name) == (expected, False)
    weights.write_bytes(header[:20])
    assert load_model(path).quantization.weights == "int8"


VARIED = (
    "llama-4-scout-fp8",
    "deepseek-v3.2-nvfp4",
    "gpt-oss-20b",
    "qwen3.5-35b-a3b",
    "mimo-v2-flash",
    "minimax-m2.5",
    "nemotron-3-nano-30b-a3b",
    "nemotron-super-49b",
    "kimi-k2.5",
    "falcon-180b",
    "gpt-j-6b",
)
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.none(), st.integers(-2, 2), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(-2, 2), max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(VARIED), st.data())
def test_any_value_in_any_field_loads_or_is_one_sentence(name: str, data: st.DataObject) -> None:
    config = card_config(name)
    block = config
    if "quantization_config" in config and data.draw(st.booleans()):
        block = config["quantization_config"]
    block[data.draw(st.sampled_from(sorted(block)))] = data.draw(STRANGE)
    try:
        model = model_from_config(config, "x")
    except SpecError as error:
        assert "\n" not in str(error).strip()  # noqa: PT017
    else:
        assert count_parameters(model).total > 0
        assert all(size >= 0 for size in weight_bytes(model).values())


# How the layers of each family are told apart.


def mixer_of(layer: Layer) -> Attention:
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def test_deepseek_has_dense_layers_first_and_no_prediction_layer() -> None:
    config = card_config("deepseek-v3") | {"head_dim": 64}  # some files state the rotary part as head_dim
    found = layers(config)
    assert len(found) == 61
    assert [isinstance(layer.ffn, DenseFFN) for layer in found[:4]] == [True, True, True, False]
    mixer, moe = found[3].mixer, found[3].ffn
    assert isinstance(mixer, LatentAttention)
    assert (mixer.kv_lora_rank, mixer.qk_rope_head_dim, mixer.indexer) == (512, 64, None)
    assert isinstance(moe, MoEFFN)
    assert (moe.shared_intermediate_size, moe.num_groups, moe.top_k_groups) == (2048, 8, 4)


def test_deepseek_v3_2_has_an_indexer() -> None:
    mixer = load_model("deepseek-v3.2").layers[0][0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.indexer is not None
    assert mixer.indexer.top_k == 2048


def test_gpt_oss_alternates_windows_and_has_sinks_and_biases() -> None:
    config = card_config("gpt-oss-20b")
    written = layers(config)
    del config["layer_types"]
    assert layers(config) == written  # the class's default pattern
    assert [mixer_of(layer).window for layer in written[:3]] == [128, None, 128]
    assert mixer_of(written[0]).sinks
    assert mixer_of(written[0]).out_bias
    moe = written[0].ffn
    assert isinstance(moe, MoEFFN)
    assert moe.bias
    assert moe.router_bias


def test_llama_4_has_chunks_but_for_every_fourth_layer_and_a_shared_expert() -> None:
    found = list(load_model("llama-4-maverick").iter_layers())
    assert [mixer_of(layer).chunk for layer in found[:4]] == [8192, 8192, 8192, None]
    assert [mixer_of(layer).rope is not None for layer in found[:4]] == [True, True, True, False]
    dense, moe = found[0].ffn, found[1].ffn
    assert isinstance(dense, DenseFFN)
    assert dense.intermediate_size == 16384
    assert isinstance(moe, MoEFFN)
    assert (moe.top_k, moe.shared_intermediate_size, moe.shared_gate) == (1, 8192, False)
    written = card_config("llama-4-maverick") | {"no_rope_layers": [1, 1, 1, 0] * 12}
    assert layers(written) == found


def test_mimo_v2_has_other_heads_in_its_sliding_layers() -> None:
    found = list(load_model("mimo-v2-flash").iter_layers())
    full, sliding = mixer_of(found[0]), mixer_of(found[1])
    assert (full.window, full.num_kv_heads, full.head_dim, full.v_head_dim, full.sinks) == (None, 4, 192, 128, False)
    assert (sliding.window, sliding.num_kv_heads, sliding.sinks) == (128, 8, True)
    assert isinstance(found[0].ffn, DenseFFN)
    assert isinstance(found[1].ffn, MoEFFN)


def test_qwen_3_5_mixes_delta_nets_and_gated_attention() -> None:
    config = card_config("qwen3.5-35b-a3b")
    found = layers(config)
    assert [isinstance(layer.mixer, GatedDeltaNet) for layer in found[:4]] == [True, True, True, False]
    assert mixer_of(found[3]).output_gate
    moe = found[0].ffn
    assert isinstance(moe, MoEFFN)
    assert moe.shared_gate
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    del config["full_attention_interval"]
    assert layers(config, layer_types=kinds * 10) == found


def test_nemotron_h_layers_hold_one_block_each() -> None:
    found = list(load_model("nemotron-3-super-120b-a12b-fp8").iter_layers())
    assert len(found) == 88
    assert isinstance(found[0].mixer, Mamba)
    assert found[0].ffn is None
    assert found[1].mixer is None
    moe = found[1].ffn
    assert isinstance(moe, MoEFFN)
    assert (moe.latent_size, moe.gated, moe.top_k) == (1024, False, 22)
    assert isinstance(found[7].mixer, Attention)


def test_nemotron_nas_blocks_may_lack_attention_and_round_their_width() -> None:
    """ffn_mult 5.25: int(2 * 5.25 * 8192 / 3) = 28672 = 112 * 256; 1.3125: 7168 = 28 * 256; 0.5: 2730 -> 2816."""
    found = list(load_model("nemotron-super-49b").iter_layers())
    assert sum(layer.mixer is None for layer in found) == 31
    widths = {layer.ffn.intermediate_size for layer in found if isinstance(layer.ffn, DenseFFN)}
    assert {28672, 7168, 2816} <= widths


def test_a_nas_block_gives_the_query_heads_per_kv_head() -> None:
    """16 of 64 query heads share a KV head: 4 KV heads. Widths are rounded up to 256: int(2 * 1.01 * d / 3) = 5515."""
    config = card_config("nemotron-super-49b")
    block = {"attention": {"n_heads_in_group": 16}, "ffn": {"ffn_mult": 1.01}}
    (layer,) = layers(config, num_hidden_layers=1, block_configs=[block])
    assert isinstance(layer.ffn, DenseFFN)
    assert (mixer_of(layer).num_heads, mixer_of(layer).num_kv_heads) == (64, 4)
    assert layer.ffn.intermediate_size == 22 * 256


@pytest.mark.parametrize(
    ("scaling", "amplitude"),
    [
        ({"factor": 4.0}, 1.138629),  # transformers: 0.1 ln 4 + 1
        ({"factor": 40.0}, 1.368888),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5}, (1 + 0.0707 * 3.688879) / (1 + 0.05 * 3.688879)),
        ({"factor": 40.0, "attention_factor": 1.5}, 1.5),
        ({"factor": 1.0}, 1.0),
        ({"original_max_position_embeddings": 32768}, 1.138629),  # max_position_embeddings is four times this
    ],
)
def test_yarn_amplitude_is_one_plus_a_tenth_of_the_logarithm_of_its_factor(
    scaling: dict[str, Any], amplitude: float
) -> None:
    """Peng et al. 2023; values of transformers' modeling_rope_utils.py."""
    rope = mixer_of(layers(LLAMA, num_hidden_layers=1, rope_scaling={"type": "yarn", **scaling})[0]).rope
    assert rope is not None
    assert rope.scaling is not None
    assert rope.scaling.amplitude == pytest.approx(amplitude, rel=1e-5)


def test_the_factor_enters_the_scale_of_latent_attention_squared() -> None:
    """DeepSeek-V3: (0.1 ln 40 + 1)^2 / sqrt(128 + 64) = 0.13523."""
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    mixer = layers(card_config("deepseek-v3"), rope_scaling=scaling)[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.softmax_scale == pytest.approx(0.135234, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [4096] * 4),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 4096, 4096],
        ),
        ({"sliding_window": 1 << 20}, [None] * 4),  # wider than the context: no limit
        ({"model_type": "mistral", "sliding_window": 131072}, [None] * 4),  # as long as the context
        ({"model_type": "mistral", "sliding_window": 131071}, [131071] * 4),
        ({"model_type": "gemma2", "sliding_window": 4096}, [4096, None, 4096, None]),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, [64, 64, 64, None]),
    ],
)
def test_which_layers_slide(changes: dict[str, Any], windows: list[int | None]) -> None:
    found = layers(LLAMA, **{"num_hidden_layers": 4, **changes})
    assert [mixer_of(layer).window for layer in found] == windows


# Field names of transformers 4 and 5, and of configs on the hub.
@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 500000.0, None),
        ({"rope_scaling": None}, 500000.0, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 500000.0, "llama3"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 500000.0, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, 1e6, None),
    ],
)
def test_rotary_frequencies_by_any_names(fields: dict[str, Any], theta: float, scaling: str | None) -> None:
    model = model_from_config(LLAMA | fields, "x")
    assert (model.ropes[0].theta, model.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("name", ["rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"])
def test_the_epsilon_of_norms_by_any_name(name: str) -> None:
    assert model_from_config(LLAMA | {name: 1e-5}, "x").norm_eps == 1e-5
    assert model_from_config(LLAMA, "x").norm_eps == 1e-6  # LlamaConfig's own


def test_multipliers_follow_the_code_of_their_family() -> None:
    """Granite divides logits by 16; Gemma multiplies embeddings by the root of 3,584; OPT's table has two
    rows more than positions."""
    assert load_model("granite-3.3-8b").logit_scale == 1 / 16
    assert load_model("gemma-2-9b").embedding_scale == pytest.approx(59.8665, rel=1e-5)
    assert load_model("llama-3.1-8b").embedding_scale == load_model("llama-3.1-8b").logit_scale == 1.0
    assert load_model("opt-13b").num_learned_positions == 2048 + 2


def test_sizes_that_the_code_of_a_family_derives_from_its_config() -> None:
    """Qwen-7B's 22,016 are gate and up together; Gemma-2-27B divides scores by the root of 144; the rank of Mamba's
    time steps is a sixteenth of the width, rounded up."""
    first = {"model_type": "qwen", "intermediate_size": 22016, "kv_channels": 128, "seq_length": 8192}
    (layer,) = layers(LLAMA, num_hidden_layers=1, num_key_value_heads=None, **first)
    assert isinstance(layer.ffn, DenseFFN)
    assert layer.ffn.intermediate_size == 11008
    assert mixer_of(next(load_model("gemma-2-27b").iter_layers())).softmax_scale == pytest.approx(1 / 12)
    sizes = {"model_type": "mamba", "hidden_size": 2570, "num_hidden_layers": 1, "state_size": 16, "vocab_size": 1000}
    mixer = layers(sizes)[0].mixer
    assert isinstance(mixer, Mamba)
    assert mixer.dt_rank == 161
