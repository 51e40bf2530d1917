"""The JSON Schemas that editors use accept every file of ours and refuse what the program refuses."""

import copy
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.yaml_loader import dump_yaml
from perfmodel.specs import SCHEMA_KINDS, find_file, list_names, load_scenario, load_yaml, scenario_schema, schema

jsonschema = pytest.importorskip("jsonschema")

_FILES = {
    "family": "families",
    "hardware": "hardware",
    "model": "models",
    "scenario": "scenarios",
    "study": "studies",
    "traffic": "traffic",
}


def validator(kind: str) -> Any:
    return jsonschema.Draft202012Validator(schema(kind))


@pytest.mark.parametrize("kind", SCHEMA_KINDS)
def test_a_schema_is_valid_json_schema(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(kind))


@pytest.mark.parametrize("kind", SCHEMA_KINDS)
def test_a_schema_accepts_every_file_of_its_kind(kind: str) -> None:
    check = validator(kind)
    names = list_names(_FILES[kind])  # type: ignore[arg-type]
    assert names
    for name in names:
        data = load_yaml(find_file(_FILES[kind], name)).data  # type: ignore[arg-type]
        assert [error.message for error in check.iter_errors(data)] == [], name


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("engine", "max_num_seq"), 4),
        (("engine", "max_num_seqs"), "many"),
        (("engine", "max_num_seqs"), "8 kB"),
        (("engine", "max_num_seqs"), 0),
        (("engine", "max_num_batched_tokens"), 8.5),
        (("engine", "dtype"), "bfloat15"),
        (("traffic", "arrivals", "rate"), -1),
        (("slo", "ttft_ms"), -1),
        (("model",), 3),
    ],
)
def test_the_scenario_schema_refuses(path: tuple[str, ...], value: object) -> None:
    data = copy.deepcopy(load_yaml(find_file("scenarios", "llama-3.1-8b-a100")).data)
    assert validator("scenario").is_valid(data)
    block = data
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = value
    assert not validator("scenario").is_valid(data)


def test_the_scenario_schema_takes_names_and_quantities() -> None:
    data = copy.deepcopy(load_yaml(find_file("scenarios", "llama-3.1-8b-a100")).data)
    del data["name"]
    data["traffic"] = "azure-code"
    data["slo"] = {"ttft_ms": "0.5 s"}
    assert validator("scenario").is_valid(data)
    assert "h100-sxm-80gb" in scenario_schema()["properties"]["hardware"]["examples"]


@pytest.mark.parametrize("count", [8000, "8k", "8K", " 1.5k ", "1.5K", "8 kk", "k", "8", "-8k", 0, 2**63, 7.0])
def test_the_schema_takes_the_counts_that_the_loader_takes(count: object, tmp_path: Path) -> None:
    data = copy.deepcopy(load_yaml(find_file("scenarios", "llama-3.1-8b-a100")).data)
    data["traffic"]["num_requests"] = count
    path = tmp_path / "s.yaml"
    path.write_text(dump_yaml(data))
    try:
        load_scenario(path)
        is_taken = True
    except SpecError:
        is_taken = False
    assert validator("scenario").is_valid(data) == is_taken


def test_an_unknown_kind() -> None:
    with pytest.raises(SpecError, match="Did you mean 'scenario'"):
        schema("scenarios")
