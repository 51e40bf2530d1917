"""Calibration files hold fitted parameters and nothing else: no measured times, no model, no file of measurements.

A table of measured times would answer for the shapes that it lists, a model's name for that model; both would look like
knowledge about a device and be none.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from perfmodel.cost import Calibration, EngineProfile
from perfmodel.cost.calibrations.backends import BackendFits
from perfmodel.cost.calibrations.files import _kinds_in
from perfmodel.cost.calibrations.for_all import ExchangeFits, KernelErrors, RoutingFit, SparseAttentionFits
from perfmodel.cost.calibrations.host_work import HostWork, ImageWork
from perfmodel.cost.calibrations.whole_runs import WholeRunFits
from perfmodel.cost.kernel_models.overheads import OverheadFits
from perfmodel.cost.kernel_models.registry import KernelFit
from perfmodel.cost.memory.adapters import AdapterFits
from perfmodel.cost.power import PowerFit
from perfmodel.files.catalog import data_dir, find_file
from perfmodel.files.fitted import HEADER
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.models.cards import load_card
from perfmodel.specs import list_models
from perfmodel.specs.engine.speculation import AcceptanceCatalog

FILES = sorted(data_dir("calibrations").rglob("*.yaml"))
KINDS = {
    "acceptance": AcceptanceCatalog,
    "adapters": AdapterFits,
    "host_images": ImageWork,
    "host_libraries": HostWork,
    "engine": EngineProfile,
    "prior": Calibration,
    "backend": BackendFits,
    "exchange": ExchangeFits,
    "kernel_errors": KernelErrors,
    "overheads": OverheadFits,
    "power": PowerFit,
    "routing": RoutingFit,
    "sparse_attention": SparseAttentionFits,
    "whole_runs": WholeRunFits,
}  # others are calibrations of a device
MAX_NUMBERS = 3  # in one entry of a list: (most rows, tile rows, tile columns), (first group, last group)
MAX_ENTRIES = 8  # of a list: the lines of a library's tile rule
DATA_FILE = re.compile(r"\w\.(json|jsonl|csv|tsv|parquet|gz|npz|npy|pkl|pickle|xlsx|yaml|txt)\b", re.IGNORECASE)


@lru_cache
def names_of_models() -> frozenset[str]:
    """Names, aliases and Hugging Face ids of all cards, and the ids without their owner, in lower case."""
    names: set[str] = set()
    for name in list_models():
        card = load_card(find_file("models", name))
        for each in (card.name, *card.aliases, *((card.hf_id,) if card.hf_id else ())):
            names |= {each.lower(), each.split("/")[-1].lower()}
    return frozenset(names)


def models_in(text: str) -> list[str]:
    """Models that a text names, as words of their own."""
    lower = text.lower()
    return sorted(n for n in names_of_models() if re.search(rf"(?<![a-z0-9]){re.escape(n)}(?![a-z0-9])", lower))


def lists_in(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every list of a document, with its place."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from lists_in(each, f"{path}.{key}")
    elif isinstance(value, list):
        yield path, value
        for number, each in enumerate(value):
            yield from lists_in(each, f"{path}[{number}]")


def num_parameters(fit: dict[str, Any]) -> int:
    """Numbers of a fit in a file, those of a fit inside it included; what a kernel is made for was not fitted."""
    values = [value for key, value in fit.items() if key not in ("residuals", "kernel", "domain", "link_latency_s")]
    return sum(num_parameters(value) if isinstance(value, dict) else isinstance(value, float) for value in values)


def test_there_are_files() -> None:
    assert len(FILES) > 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_holds_the_fields_of_its_forms_only(file: Any) -> None:
    """Unknown keys are refused by the forms themselves; this states it of every file, and that a command wrote it."""
    assert file.read_text(encoding="utf-8").startswith(HEADER)
    kind = KINDS.get(file.stem.partition("@")[0], Calibration)
    assert kind.model_config["extra"] == "forbid"
    found = kind.model_validate(load_yaml(file).data)
    for fit in getattr(found, "families", {}).values():
        assert type(fit).model_config["extra"] == "forbid"
        with pytest.raises(ValueError):
            TypeAdapter(KernelFit).validate_python({**fit.model_dump(), "latency_ms": [1.0, 2.0]})


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_holds_no_table(file: Any) -> None:
    for path, values in lists_in(load_yaml(file).data):
        numbers = [value for value in values if isinstance(value, int | float)]
        assert len(numbers) <= MAX_NUMBERS, f"{file.name}: {path} holds {len(numbers)} numbers"
        assert len(values) <= MAX_ENTRIES, f"{file.name}: {path} has {len(values)} entries"


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_fit_has_fewer_parameters_than_rows(file: Any) -> None:
    """As many fits as shapes would be a table as well."""
    if file.stem.partition("@")[0] in KINDS:
        return
    for key, fit in load_yaml(file).data["families"].items():
        assert num_parameters(fit) < fit["residuals"]["num_rows"], f"{file.name}: {key}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_names_no_model_and_no_file_of_measurements(file: Any) -> None:
    text = file.read_text(encoding="utf-8")
    if file.stem == "acceptance":  # how many of its drafts are right is a model's own, by its name
        text = re.sub(r"^ +model: .*$|^  \S+ \S+ \S+:$", "", text, flags=re.MULTILINE)
    assert not models_in(text)
    assert not DATA_FILE.findall(text)


@pytest.mark.parametrize("file", [path for path in FILES if "@" in path.name], ids=lambda path: path.name)
def test_kinds_of_kernels_can_be_read_off_the_text(file: Any) -> None:
    """A file whose kinds are missed would not be parsed, and devices that lack these kernels would not get them."""
    families = load_yaml(file).data.get("families", {})
    kinds = {(key.split("/")[0], fit["form"]) for key, fit in families.items()}
    assert _kinds_in(file, file.stat().st_mtime_ns) == kinds


def test_the_search_finds_what_it_looks_for() -> None:
    assert "llama-3.1-8b" in models_in("source: 3 times in rtx4090-llama-3.1-8b/")
    assert models_in("command: perfmodel calibrate --from Qwen3-32B")
    assert not models_in("source: 23 runs of a server")
    assert DATA_FILE.search("23 runs in vllm_runs.json")
    assert DATA_FILE.search("steady_state.csv.gz")
    assert not DATA_FILE.search("vLLM 0.15.1, casys-kaist/LLMServingSim (MIT)")
