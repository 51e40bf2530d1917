"""Cards: found by every name people use, equal to the config.json they were taken from."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir, find_file, normal_name
from perfmodel.models import list_models, load_model
from perfmodel.models.architecture import Attention, LatentAttention, Layer, MoEFFN, Rope, Routing
from perfmodel.models.cards import load_card
from perfmodel.models.hf.config import load_config
from perfmodel.models.params import count_parameters
from perfmodel.models.spec import ModelSpec
from perfmodel.specs import load_scenario

CONFIGS = Path(__file__).resolve().parents[4] / "shared" / "model_configs"


QWEN3_OF_JULY = [f"{size}-{kind}" for size in ("4B", "30B-A3B", "235B-A22B") for kind in ("Instruct", "Thinking")]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("QWEN3-32B", "qwen3-32b"),
        ("zhipuai/GLM-5", "glm-5"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-v3.1-nvfp4"),
        ("LLaMA v3.1 405B", "llama-3.1-405b"),
        ("codellama/CodeLlama-34b-Instruct-hf", "codellama-34b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_aliases_lead_to_the_card(said: str, name: str) -> None:
    assert load_model(said).name == name


def test_every_card_is_called_as_its_file_and_no_alias_is_taken_twice() -> None:
    seen: dict[str, str] = {}
    for name in list_models():
        card = load_card(data_dir("models") / f"{name}.yaml")
        assert card.name == name
        assert name == name.lower()
        names = [normal_name(label) for label in (name, *card.aliases)]
        assert len(set(names)) == len(names), f"{name} has an alias twice"
        for alias in {alias.lower() for alias in card.aliases} | {name}:
            assert seen.setdefault(alias, name) == name, f"{alias} means {seen[alias]} and {name}"


@pytest.mark.parametrize("repository", [f"Qwen/Qwen3-{size}-2507" for size in QWEN3_OF_JULY])
def test_later_releases_of_a_model_have_their_own_positions(repository: str) -> None:
    """Of July 2025: 262,144 positions (the model cards), where those of the first release have 40,960."""
    assert load_model(repository).max_position_embeddings == 262144
    assert load_model(re.sub(r"-(Thinking|Instruct)-2507", "", repository)).max_position_embeddings == 40960


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"llama-3\.1-8b"):
        load_model("llama-3.1-8bb")


@pytest.mark.parametrize("name", list_models())
def test_a_repository_name_works_without_its_owner(name: str) -> None:
    """`Qwen3-4B-Thinking-2507` as `Qwen/Qwen3-4B-Thinking-2507`, unless another card has that name."""
    for alias in load_card(data_dir("models") / f"{name}.yaml").aliases:
        plain = alias.rpartition("/")[2]
        assert load_model(plain).layers == load_model(name if plain.lower() not in list_models() else plain).layers


def test_suggestions_are_unique() -> None:
    with pytest.raises(SpecError) as refusal:
        load_model("phi4")
    offered = re.findall(r"'([^']+)'", str(refusal.value).partition("Did you mean")[2])
    assert "phi-4" in offered
    assert len({offer.rpartition("/")[2] for offer in offered}) == len(offered)


@pytest.mark.parametrize("release", ["9B-v2", "9B-v2-Base"])
def test_both_releases_of_nemotron_nano_2_are_known(release: str) -> None:
    model = load_model(f"nvidia/NVIDIA-Nemotron-Nano-{release}")
    assert (model.num_layers, model.max_position_embeddings) == (56, 131072)


def test_a_card_with_a_misspelt_key_says_file_line_and_field(tmp_path: Path) -> None:
    card = tmp_path / "mine.yaml"
    card.write_text("name: mine\nsource: me\nsamplng: greedy\nconfig: {model_type: llama}\n")
    with pytest.raises(SpecError, match=r"mine\.yaml:3: samplng: unknown key 'samplng'.*sampling"):
        load_model(card)


def test_a_card_without_a_size_says_which_field_is_missing(tmp_path: Path) -> None:
    card = tmp_path / "mine.yaml"
    card.write_text("name: mine\nsource: me\nconfig: {model_type: llama, vocab_size: 100, hidden_size: 64}\n")
    with pytest.raises(SpecError, match=r"mine\.yaml: num_hidden_layers .* is missing"):
        load_model(card)


def test_a_card_at_a_path_loads_without_being_installed(tmp_path: Path) -> None:
    card = tmp_path / "mine.yaml"
    original = (data_dir("models") / "tiny-llama.yaml").read_text()
    card.write_text(original.replace("name: tiny-llama", "name: mine"))
    assert load_model(card).layers == load_model("tiny-llama").layers
    card.write_text(original.replace("num_hidden_layers: 8", "num_hidden_layers: 4"))
    assert load_model(card).num_layers == 4  # a changed file is read again


def test_the_small_models_that_a_cpu_executes() -> None:
    llama, moe, swa = (load_model(name) for name in ("tiny-llama", "tiny-moe", "tiny-swa"))
    assert (llama.num_layers, llama.hidden_size, llama.vocab_size) == (8, 512, 8192)
    ffn = moe.layers[0][0].ffn
    assert isinstance(ffn, MoEFFN)
    assert (ffn.num_experts, ffn.top_k, ffn.intermediate_size) == (8, 2, 704)
    assert swa.attention_spans == (256,)
    windows = [layer.mixer.window for layer in swa.iter_layers() if isinstance(layer.mixer, Attention)]
    assert windows == [256, None] * 4


def test_loading_a_card_is_cheap() -> None:
    """Far below 10 ms each; the limit leaves room for a machine ten times slower."""
    load_model("tiny-llama")
    names = list_models()
    start = time.process_time()
    for name in names:
        load_model(name)
    assert (time.process_time() - start) / len(names) < 0.010


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the original config.json files are not beside this checkout")
def test_every_config_has_a_card_with_the_same_architecture() -> None:
    """In all that time depends on: cards leave out the angles of rotary embeddings, and how routers weigh experts."""
    for path in sorted(CONFIGS.glob("*.json")):
        from_file = load_config(path)
        card = load_model(path.stem.replace("--", "/"))
        config = json.loads(path.read_text())
        assert [_timed(each) for each in card.iter_layers()] == [_timed(each) for each in from_file.iter_layers()], path
        for name in ("hidden_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "dtype"):
            assert getattr(card, name) == getattr(from_file, name), f"{path.name}: {name}"
        if _is_whole(config) and "quantization_config" in config:
            assert card.quantization == from_file.quantization, path.name


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the original config.json files are not beside this checkout")
def test_every_config_has_the_published_number_of_parameters() -> None:
    """Within 0.5 %, or within the rounding of what is published (35B)."""
    for path in sorted(CONFIGS.glob("*.json")):
        card = load_card(find_file("models", load_model(path.stem.replace("--", "/")).name))
        published = card.published_params
        assert published is not None
        counted = float(count_parameters(load_config(path)).total)
        counted += card.extra_params if card.published_covers == "decoder and vision" else 0.0
        digits = len(f"{published:.0f}".rstrip("0"))
        rounding = 0.5 * 10 ** (len(f"{published:.0f}") - digits)
        assert abs(counted - published) <= max(0.005 * published, rounding), path.name


def _timed(layer: Layer) -> Layer:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, Attention | LatentAttention):
        mixer = replace(mixer, rope=Rope(), softmax_scale=None)
    if isinstance(ffn, MoEFFN):
        ffn = replace(ffn, routing=Routing())
    return replace(layer, mixer=mixer, ffn=ffn)


def _is_whole(config: object) -> bool:
    """Whether the file's list of unquantized modules was not shortened."""
    return "more entries dropped" not in json.dumps(config)


def test_sampling_follows_the_generation_config() -> None:
    def sampling(name: str) -> str:
        model: ModelSpec = load_model(name)
        return model.sampling

    assert {sampling(n) for n in ("llama-3.1-8b", "llama-2-7b", "qwen3-14b", "llama-4-scout-fp8")} == {"top_p"}
    assert {sampling(n) for n in ("codellama-34b", "mixtral-8x7b", "mistral-nemo")} == {"greedy"}


@pytest.mark.parametrize(
    ("asked", "name", "hf_id"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama-3.3-70b", "llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama-3.1-70b", "llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B"),
        ("Llama_3.1-70B", "llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B"),
    ],
)
def test_a_scenario_keeps_the_name_that_was_asked_for(asked: str, name: str, hf_id: str) -> None:
    """One card stands for several checkpoints of an architecture; what is served is the one that was named."""
    model = load_scenario("llama-3.1-70b-h100-tp4", [f"model={asked}"]).model
    assert (model.name, model.hf_id) == (name, hf_id)
    assert model.layers == load_model("llama-3.1-70b").layers
