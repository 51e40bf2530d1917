"""JSON Schemas for editors (`# yaml-language-server: $schema=scenario.schema.json`), and meanings of fields.

Meanings come from docstrings and field comments of specs, else from `meanings.yaml`."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.base import Spec
from perfmodel.files.blocks import block_class
from perfmodel.files.catalog import list_names
from perfmodel.files.device_tables import device_names
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.models.cards import Card
from perfmodel.specs.devices import DeviceFamily
from perfmodel.specs.engine.devices import VERSIONED_DEFAULTS
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Traffic

SCHEMA_KINDS = ("family", "hardware", "model", "scenario", "study", "traffic")
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# What pydantic writes beside a number, in JSON Schema's own words (they bind numbers, not strings with units).
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a file of `kind`, one of SCHEMA_KINDS."""
    if kind == "scenario":
        return scenario_schema()
    if kind not in SCHEMA_KINDS:
        known = ", ".join(SCHEMA_KINDS)
        raise SpecError(f"no schema for {kind!r}; there is one for {known}.{did_you_mean(kind, SCHEMA_KINDS)}")
    classes: dict[str, type[BaseModel]] = {
        "family": DeviceFamily,
        "hardware": HardwareSpec,
        "model": Card,
        "traffic": Traffic,
    }
    cls = classes.get(kind) or block_class(kind)
    titles = {"family": "family of devices", "model": "model card"}
    return _titled(cls.model_json_schema(), f"perfmodel {titles.get(kind, f'{kind} file')}", cls)


def scenario_schema() -> dict[str, Any]:
    """JSON Schema of a scenario file, where model and hardware are names or paths."""
    result = Scenario.model_json_schema()
    fields = result["properties"]
    fields["model"]["examples"] = list_names("models", (".yaml", ".json"))
    fields["hardware"]["examples"] = device_names()
    named = {
        "type": "string",
        "description": "A name in workloads/traffic, or a path",
        "examples": list_names("traffic"),
    }
    fields["traffic"] = {"anyOf": [fields["traffic"], named]}
    required = [name for name in result.pop("required") if name != "name"]  # the file's own name stands in
    # A published figure of a kernel or of a step needs neither a model nor traffic.
    result |= {"if": {"required": ["published"]}, "then": {"required": ["hardware"]}, "else": {"required": required}}
    body = _titled(result, "perfmodel scenario file", Scenario)
    engine = body["$defs"]["EngineSpec"]["properties"]
    engine["profile"]["examples"] = list_names("engines")
    engine["version"]["anyOf"].append({"type": "number"})  # as YAML reads it
    for name in VERSIONED_DEFAULTS:
        del engine[name]["default"]
        sentences = [engine[name].get("description"), "By default that of the engine's version on the device"]
        engine[name]["description"] = ". ".join(filter(None, sentences))
    return body


def _titled(body: dict[str, Any], title: str, cls: type[BaseModel]) -> dict[str, Any]:
    body["title"] = title
    specs = every_spec()
    _describe(body, cls, specs)
    for name, item in body.get("$defs", {}).items():
        _describe(item, specs.get(name), specs)
    plain: dict[str, Any] = _with_json_schema_limits(body)
    return {"$schema": _DIALECT, **plain}


def _describe(body: dict[str, Any], cls: type[BaseModel] | None, specs: Mapping[str, type[Spec]]) -> None:
    """Add descriptions to fields, or to the object they hold."""
    meanings = meanings_of(cls) if cls is not None else {}
    for name, node in body.get("properties", {}).items():
        inner = next((specs[ref] for ref in refs_of(node) if ref in specs), None)
        of_object = re.split(r"[.;:](?:\s|$)", summary_of(inner), maxsplit=1)[0] if inner is not None else ""
        if meaning := meanings.get(name) or node.get("description") or of_object:
            node["description"] = meaning


def refs_of(node: Any) -> Iterator[str]:
    """Definitions that a schema part refers to."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for value in node.values():
            yield from refs_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from refs_of(value)


def _with_json_schema_limits(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_json_schema_limits(item) for item in node]
    if not isinstance(node, dict):
        return node
    is_number = node.get("type") in ("integer", "number", ["number", "string"])
    return {(_LIMITS.get(key, key) if is_number else key): _with_json_schema_limits(item) for key, item in node.items()}


_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): +(?P<text>.*)$")


def summary_of(cls: type[Any]) -> str:
    """Prose paragraphs of the class docstring, without its field list."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(_docstring(cls)[0])).strip()


@cache
def meanings_of(cls: type[Any]) -> dict[str, str]:
    """Documented fields and their meaning."""
    notes = dict[str, str]()
    for base in reversed(cls.__mro__):
        if getattr(base, "model_fields", None):
            notes |= _of_comments(base)
            notes |= _docstring(base)[1]
    notes |= _listed().get(cls.__name__, {})
    return {name: notes[name] for name in cls.model_fields if notes.get(name)}


def every_spec() -> dict[str, type[Spec]]:
    """All loaded specs by class name."""
    result, left = dict[str, type[Spec]](), [Spec]
    while left:
        cls = left.pop()
        result.setdefault(cls.__name__, cls)
        left += cls.__subclasses__()
    return result


@cache
def _listed() -> dict[str, dict[str, str]]:
    data: dict[str, dict[str, str]] = load_yaml(Path(__file__).with_name("meanings.yaml")).data
    return data


def _docstring(cls: type[Any]) -> tuple[list[str], dict[str, str]]:
    """(lines of prose, fields and their meaning) of a class docstring."""
    prose, notes, names = list[str](), dict[str, str](), list[str]()
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        match = _ENTRY.match(line)
        if match is not None and not cls.model_fields.keys().isdisjoint(match["names"].split(", ")):
            names = match["names"].split(", ")
            notes |= dict.fromkeys(names, match["text"])
        elif names and line.startswith(" "):
            notes |= {name: f"{notes[name]} {line.strip()}" for name in names}
        else:
            names = []
            prose.append(line)
    return prose, notes


def _of_comments(cls: type[Any]) -> dict[str, str]:
    """Comments behind a field, else above it."""
    try:
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    except OSError:
        return {}
    notes = dict[str, str]()
    for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno is not None:
            behind = lines[node.end_lineno - 1][node.end_col_offset or 0 :]
            above = takewhile(lambda line: line.startswith("#"), map(str.strip, reversed(lines[: node.lineno - 1])))
            comments = [behind] if "#" in behind else [*above][::-1]
            notes[node.target.id] = " ".join(comment.partition("#")[2].strip() for comment in comments)
    return notes
