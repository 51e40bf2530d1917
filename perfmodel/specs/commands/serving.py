"""An engine as the arguments of vLLM's server, in the words of its table of flags: what `line.py` reads back."""

__all__ = ["engine_arguments", "left_out_fields"]

import json
from functools import cache
from typing import Any

from perfmodel.files.base import Spec
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.commands.description import ModelledFlag, load_command
from perfmodel.specs.engine.spec import EngineSpec

_ENGINE = "engine."


def engine_arguments(engine: EngineSpec, model: ModelSpec) -> list[str]:
    """vLLM's arguments to serve `model`: what differs from its defaults; ranks, lengths and the step's size always."""
    arguments: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    defaults = dict(engine.described.facts.defaults)
    for name, flag in _flags().items():
        path = str(flag.field).removeprefix(_ENGINE).split(".")
        value = _value(engine, path)
        default = defaults.get(path[0], EngineSpec.model_fields[path[0]].default) if len(path) == 1 else None
        if len(path) > 1 and path[0] != "speculative_config":
            default = _value(EngineSpec(), path)
        if value is None or (value == default and not flag.always):
            continue
        parent, dot, key = name.partition(".")
        if dot:
            nested.setdefault(parent, {})[key] = value
        elif flag.kind == "switch":
            arguments.append(f"--{'' if value != flag.inverse else 'no-'}{name}")
        else:
            arguments += [f"--{name}", str(value)]
    _drafter(engine, model, nested)
    for parent, data in nested.items():
        arguments += [f"--{parent}", json.dumps(data)]
    return arguments + _offload(engine)


def left_out_fields(engine: EngineSpec) -> list[str]:
    """The fields of `engine` that were given and that no argument of vLLM's says."""
    said = {str(flag.field).removeprefix(_ENGINE).partition(".")[0] for flag in _flags().values()}
    others = engine.model_fields_set - said - {"kv_offload", "version"}
    return sorted(name for name in others if getattr(engine, name) != EngineSpec.model_fields[name].default)


@cache
def _flags() -> dict[str, ModelledFlag]:
    """The flag that says each field as it is, in the order of the table."""
    found = {}
    for name, flag in load_command("vllm").modelled.items():
        says_it = flag.only is None or bool(flag.only)
        if flag.field is not None and flag.field.startswith(_ENGINE) and says_it and "acceptance" not in flag.field:
            found[name] = flag
    return found


def _value(engine: EngineSpec, path: list[str]) -> Any:
    found: Any = engine
    for part in path:
        found = getattr(found, part, None) if isinstance(found, Spec) else None
    return found


def _drafter(engine: EngineSpec, model: ModelSpec, nested: dict[str, dict[str, Any]]) -> None:
    """What the drafter is, by the name that the Hub has for it."""
    drafts = engine.speculative_config
    if drafts is None:
        return
    nested["speculative-config"]["num_speculative_tokens"] = drafts.depth
    if drafts.is_mtp_of(model):
        nested["speculative-config"]["method"] = "mtp"
    if drafts.model is not None:
        nested["speculative-config"]["model"] = drafts.model.hf_id or drafts.model.name
        if drafts.quantization is not None:
            nested["speculative-config"]["quantization"] = drafts.quantization


def _offload(engine: EngineSpec) -> list[str]:
    """The second tier, in GiB of all ranks (vllm/config/cache.py, kv_offloading_size)."""
    if engine.kv_offload is None:
        return []
    return ["--kv-offloading-size", f"{engine.kv_offload.capacity_bytes * engine.tensor_parallel_size / 2**30:.10g}"]
