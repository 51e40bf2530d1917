"""Model cards: `load_model` finds a model by name, alias, Hugging Face id or path, whatever kind of file it is.

A card is a YAML file in `workloads/models/`: who says so, what was published, and a `config` block with Hugging Face
field names, read exactly as a config.json is."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.files.catalog import aliases_of, expanded, list_names, looked_up, normal_name, unknown_name
from perfmodel.files.sandbox import is_allowed, read_json
from perfmodel.files.units import NonNegativeFloat, PositiveFloat
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.models.executed import format_of_name
from perfmodel.models.hf.config import load_config, model_from_config
from perfmodel.models.hf.families import refuse_speech
from perfmodel.models.number_formats import with_quantization
from perfmodel.models.spec import ModelSpec, Pooling, SamplingMethod

# Who publishes copies of others' repositories under their names, as they are.
_COPIES = ("unsloth", "nousresearch")


class Card(Spec):
    """One model: facts about it, and its architecture under Hugging Face field names.

    published_params: parameters as its makers or the hub state them, never computed here
    published_covers: whether that counts the text decoder alone or the vision tower (`extra_params`) too
    sampling:         what the repository's generation_config makes a server do by default
    pooling:          of a model that returns a vector, what its 1_Pooling/config.json says"""

    name: str
    aliases: tuple[str, ...] = ()
    hf_id: str | None = None
    source: str
    published_params: PositiveFloat | None = None
    published_params_note: str | None = None
    published_covers: Literal["decoder", "decoder and vision"] = "decoder"
    sampling: SamplingMethod = "greedy"
    extra_params: NonNegativeFloat = 0.0
    pooling: Pooling | None = None
    notes: str | None = None
    config: dict[str, Any]


def list_models() -> list[str]:
    """The names of all cards, sorted; no file is opened."""
    return list_names("models")


def load_model(name_or_path: str | Path, *, ask_hub: bool = False) -> ModelSpec:
    """The model called so, or described by the file at a path.

    Names, aliases and Hugging Face ids are looked up among the cards, at last without a number format at their end,
    which the weights then have (`-FP8`, `-NVFP4`, `-AWQ`). Paths may lead to a card (.yaml), a config.json
    or a folder that holds one, a .gguf file, or .safetensors files or their index.

    ask_hub: look for other names, `org/name`, in the local cache of the Hugging Face Hub, and then on it

    Raises SpecError: an unknown name with the nearest known ones, or what is wrong with the file."""
    path, name = expanded(name_or_path), str(name_or_path)
    if is_allowed(path) and path.is_dir():
        _refuse_adapter(path)
        if (path / "config.json").is_file():
            weights = (path / name for name in ("model.safetensors.index.json", "model.safetensors"))
            path = next((file for file in weights if file.is_file()), path / "config.json")
    is_file = is_allowed(path) and path.is_file()
    if (is_file and path.suffix in (".gguf", ".safetensors")) or path.name.endswith(".safetensors.index.json"):
        from perfmodel.models.weights.headers import load_header

        return load_header(path)
    if is_file and path.suffix == ".json":
        from perfmodel.models.weights.headers import stored_beside

        return load_config(path, stored=stored_beside(path))
    file = looked_up("models", name_or_path)
    if file is not None:
        return _load_card_file(file, file.stat().st_mtime_ns)
    related = _related(name)
    if related is not None:
        return related
    refuse_speech(name)
    if ask_hub:
        from perfmodel.models.hub import is_hub_name, load_from_hub

        if is_hub_name(name):
            return load_from_hub(name)
    raise unknown_name("models", name)


def _refuse_adapter(folder: Path) -> None:
    """Raises SpecError for a folder with an adapter in place of a model."""
    file = folder / "adapter_config.json"
    if (folder / "config.json").is_file() or not file.is_file():
        return
    try:
        base = read_json(file)["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = "the base model"
    raise SpecError(
        f"{folder}: holds an adapter (LoRA), which is not modelled; give the model that it changes: {base}."
    )


def _related(name: str) -> ModelSpec | None:
    """The model whose name `name` is but for a number format at its end, in that format, or that a repository has a
    copy of (`unsloth/Qwen3-8B`); None where there is none.

    Checkpoints in another format are published so: `nvidia/Llama-3.3-70B-Instruct-FP8`. A card of their own goes first.
    """
    owner, _, last = name.partition("/")
    plain, method = format_of_name(name) or (None, None)
    file = None
    if plain is not None:  # whoever has quantized it
        file = looked_up("models", plain) or looked_up("models", normal_name(plain.rpartition("/")[2]))
    if file is None and normal_name(owner) in _COPIES:
        method, file = None, aliases_of("models").get(normal_name(last))
    if file is None:
        return None
    model = _load_card_file(file, file.stat().st_mtime_ns)
    if model.quantization.weights is None:
        model = with_quantization(model, method)
    return replace(model, name=name, hf_id=name if "/" in name else model.hf_id)


def as_asked(model: ModelSpec, asked: str) -> ModelSpec:
    """`model`, called as it was `asked` for where that is an alias of its card: one architecture has many checkpoints,
    and the one that is to be served is the one that was named.

    Its Hugging Face id is the name itself, or the alias that it begins: `llama-3.3-70b` of a card of Llama 3.1 70B is
    meta-llama/Llama-3.3-70B-Instruct."""
    own, wanted = normal_name(model.name), normal_name(asked)
    names = [normal_name(name) for name in (*model.aliases, model.hf_id or "")]
    if wanted == own or wanted not in {*names, *(name.rpartition("/")[2] for name in names)}:
        return model
    ids = [alias for alias in model.aliases if "/" in alias]
    near = (alias for alias in ids if normal_name(alias.rpartition("/")[2]).startswith(wanted))
    return replace(model, name=asked, hf_id=asked if "/" in asked else next(near, model.hf_id))


def load_card(path: str | Path) -> Card:
    """The card in a YAML file, its `config` not yet normalised."""
    loaded = load_yaml(path)
    return parse(Card, loaded.data, loaded.positions)


@lru_cache(maxsize=256)
def _load_card_file(path: Path, modified_ns: int) -> ModelSpec:
    """The model of a card; `modified_ns` makes a changed file a new entry of the cache."""
    card = load_card(path)
    if "model_type" not in card.config:
        raise SpecError(f"{path}: config.model_type is missing; a card says which architecture its fields belong to.")
    return model_from_config(
        card.config,
        card.name,
        source=str(path),
        sampling=card.sampling,
        hf_id=card.hf_id,
        aliases=card.aliases,
        published_params=card.published_params,
        extra_params=card.extra_params,
        pooling=card.pooling,
        origin=card.source,
    )
