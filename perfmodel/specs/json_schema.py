"""JSON Schemas of the files, for editors: `# yaml-language-server: $schema=scenario.schema.json`."""

__all__ = ["SCHEMA_KINDS", "refs_of", "scenario_schema", "schema"]

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.base import Spec
from perfmodel.files.blocks import block_class
from perfmodel.files.catalog import list_names
from perfmodel.files.device_tables import device_names
from perfmodel.models.cards import Card
from perfmodel.specs.devices.family import DeviceFamily
from perfmodel.specs.engine.devices import VERSIONED_DEFAULTS
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.meanings import every_spec, meanings_of, summary_of
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Traffic

SCHEMA_KINDS = ("family", "hardware", "model", "scenario", "study", "traffic")
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# What pydantic writes beside a number, in JSON Schema's own words (they bind numbers, not strings with units).
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a file of `kind`, one of SCHEMA_KINDS."""
    if kind == "scenario":
        return scenario_schema()
    if kind == "hardware":
        return _titled(HardwareSpec.model_json_schema(), "perfmodel hardware file", HardwareSpec)
    if kind == "family":
        return _titled(DeviceFamily.model_json_schema(), "perfmodel family of devices", DeviceFamily)
    if kind == "study":
        study = block_class("study")
        return _titled(study.model_json_schema(), "perfmodel study file", study)
    if kind == "traffic":
        return _titled(Traffic.model_json_schema(), "perfmodel traffic file", Traffic)
    if kind == "model":
        return _titled(Card.model_json_schema(), "perfmodel model card", Card)
    raise SpecError(
        f"no schema for {kind!r}; there is one for {', '.join(SCHEMA_KINDS)}.{did_you_mean(kind, SCHEMA_KINDS)}"
    )


def scenario_schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file, where model and hardware are names or paths."""
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
    found = _titled(result, "perfmodel scenario file", Scenario)
    _describe_engine(found["$defs"]["EngineSpec"]["properties"])
    return found


def _describe_engine(fields: dict[str, Any]) -> None:
    """Engines by name, versions also where YAML reads a number, and whose defaults are taken."""
    fields["profile"]["examples"] = list_names("engines")
    fields["version"]["anyOf"].append({"type": "number"})
    for name in VERSIONED_DEFAULTS:
        del fields[name]["default"]
        told = [
            *filter(None, [fields[name].get("description")]),
            "By default that of the engine's version on the device",
        ]
        fields[name]["description"] = ". ".join(told)


def _titled(body: dict[str, Any], title: str, cls: type[BaseModel]) -> dict[str, Any]:
    """`body`, the schema of a file of `cls`, as an editor takes it."""
    body["title"] = title
    specs = every_spec()
    _describe(body, cls, specs)
    for name, each in body.get("$defs", {}).items():
        _describe(each, specs.get(name), specs)
    plain: dict[str, Any] = _with_json_schema_limits(body)
    return {"$schema": _DIALECT, **plain}


def _describe(body: dict[str, Any], cls: type[BaseModel] | None, specs: Mapping[str, type[Spec]]) -> None:
    """Say of each field what it means, for an editor to show; else what the object is that it holds."""
    meanings = meanings_of(cls) if cls is not None else {}
    for name, node in body.get("properties", {}).items():
        inner = next((specs[ref] for ref in refs_of(node) if ref in specs), None)
        of_object = re.split(r"[.;:](?:\s|$)", summary_of(inner), maxsplit=1)[0] if inner is not None else ""
        if told := meanings.get(name) or node.get("description") or of_object:
            node["description"] = told


def refs_of(node: Any) -> Iterator[str]:
    """The names of the definitions that a part of a schema refers to."""
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
    return {
        (_LIMITS.get(key, key) if is_number else key): _with_json_schema_limits(value) for key, value in node.items()
    }
