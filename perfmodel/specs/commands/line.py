"""From command lines as they are, of a server and of a load test, to a scenario: parsed, never executed.

A line, a script, a compose file; what it says of the scenario, what has no part in time, what has one that is not
modelled. Nothing is passed over in silence.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import expanded
from perfmodel.files.reach import may_touch, refused
from perfmodel.files.yaml_loader import flow_yaml, load_yaml, load_yaml_text
from perfmodel.specs.commands.arguments import Arguments, flags_of_mapping, read_arguments
from perfmodel.specs.commands.finding import FoundCommand, find_commands
from perfmodel.specs.commands.load import read_load
from perfmodel.specs.commands.manifests import is_manifest, read_manifest
from perfmodel.specs.commands.server import Reading, complete, read_server
from perfmodel.specs.commands.shell import PodPlacement, ShellScript, read_shell
from perfmodel.specs.devices import find_device
from perfmodel.specs.engine.description import load_engine_description
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.shorthand import name_of

_MOST_SERVERS = 64
_WIDTH = 110  # of comments in the written file
_BLOCKS = ("engine", "cluster", "traffic", "slo", "sampling")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked beside the line.

    model, traffic: in place of what the line says; hardware: the devices that it runs on
    data:    further blocks of the scenario (traffic, slo), which go before the line's
    folder:  that files which the line names are in
    """

    model: str | None = None
    hardware: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=Path)


@dataclass(frozen=True, slots=True)
class LineScenario:
    """data: of the scenario file; sources: field -> the words that set it; commands: the lines, and where they stand.

    irrelevant, unmodelled, notes, assumed: as of `Reading`
    """

    data: dict[str, Any]
    sources: Mapping[str, str]
    commands: tuple[str, ...]
    irrelevant: tuple[str, ...]
    unmodelled: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    assumed: tuple[str, ...]


def read_line(text: str, asking: Asking, place: str = "line") -> LineScenario:
    """The scenario of a command line, a script, or a compose file.

    asking: what the line does not say
    place:  what errors call the text

    Raises SpecError, in one sentence: for an unknown flag with the nearest known ones, for `$(...)` and variables that
    are not set, for what is missing.
    """
    script = read_manifest(text, place) if is_manifest(text) else read_shell(text, place)
    found = find_commands(script, place)
    servers = [each for each in found if each.description.role == "server"]
    loads = [each for each in found if each.description.role == "load"]
    if not servers and not loads:
        raise SpecError(f"{place}: {_nothing_found(script)}")
    readings = [_server(each, script, asking) for each in servers[:_MOST_SERVERS]]
    base = _together(readings, servers) if readings else Reading()
    if loads:
        _add_load(base, loads, script, asking)
    return _scenario(base, [*servers, *loads[:1]], asking, bool(servers))


def _nothing_found(script: ShellScript) -> str:
    from perfmodel.specs.commands.description import all_commands

    known = ", ".join(f"`{each.title}`" for each in all_commands())
    first = next((" ".join(each.words[:3]) for each in script.commands if each.words), "")
    return (
        f"found no command that is known ({f'it begins with {first!r}' if first else 'it is empty'}), allowed {known}."
    )


def _server(command: FoundCommand, script: ShellScript, asking: Asking) -> Reading:
    description = command.description
    arguments = _with_config(read_arguments(command.words, description, command.place), command, script, asking)
    reading = read_server(arguments, command.environment, description, command.place)
    assert description.engine is not None
    complete(reading, description.name, description.engine)
    _place(reading, command.placement, asking.hardware, command.place)
    if command.version is not None:
        chosen = load_engine_description(description.engine).choose(command.version)
        if chosen.age == "described":
            reading.put("engine.version", command.version, f"the image {command.image}")
        else:
            reading.notes.append(f"the image {command.image}: {chosen.note}")
    return reading


def _place(reading: Reading, placement: PodPlacement, hardware: str | None, place: str) -> None:
    """Add the replicas and the device of a manifest; note what does not fit, or what `hardware` replaces."""
    if placement.replicas is not None:
        reading.put("cluster.replicas", placement.replicas, f"replicas: {placement.replicas}")
    if placement.device is not None:
        try:
            find_device(placement.device)
        except SpecError as error:
            if hardware is None:
                raise SpecError(f"{place}: nodes with {placement.device}: {error} Or give --hardware.") from None
            reading.notes.append(f"Not read: nodes with {placement.device}, which is no device of hardware_specs")
        else:
            device = name_of("hardware", placement.device)
            if hardware is None:
                reading.put("hardware", device, f"nodes with {placement.device}")
            elif name_of("hardware", hardware) != device:
                reading.notes.append(f"nodes with {placement.device}: --hardware {hardware} replaces it")
    engine = EngineSpec.model_validate({key: reading.get(f"engine.{key}") or 1 for key in _PARALLEL})
    pods = placement.size or 1
    if placement.gpus is not None and placement.gpus * pods != engine.num_devices:
        given = f"{placement.gpus} GPUs" if pods == 1 else f"{pods} pods of {placement.gpus} GPUs"
        reading.notes.append(f"the manifest gives {given} to a server that uses {engine.num_devices}")
    elif placement.gpus is None and placement.size is not None:
        reading.notes.append(f"Not read: size: {placement.size} of a group, whose pods name no GPUs")


def _with_config(arguments: Arguments, command: FoundCommand, script: ShellScript, asking: Asking) -> Arguments:
    """The flags of the line and of the file that `--config` names; which of them count the engine says."""
    names = [name for name in command.description.config if name in arguments.given]
    if not names:
        return arguments
    given = arguments.given.pop(names[0])
    file = str(given.value)
    text = next(
        (script.files[name] for name in (file, f"./{file}", file.removeprefix("./")) if name in script.files), None
    )
    path = asking.folder / expanded(file)
    if text is None and not may_touch(path):
        raise SpecError(f"{command.place}: {given.written}: {refused(file)}")
    if text is None and not isfile(path):  # Path.is_file raises OSError for a name that is too long
        raise SpecError(
            f"{command.place}: {given.written[:100]}: no such file beside the line ({str(path)[:300]}); put it there, "
            f"or give its flags in the line."
        )
    loaded = load_yaml_text(text, file) if text is not None else load_yaml(path)
    of_file = flags_of_mapping(loaded.data, command.description, file)
    wins = command.description.config_wins
    merged, after = (arguments, of_file) if wins else (of_file, arguments)
    merged.notes += after.notes
    for flag in after.given.values():
        merged.add(flag)
    return merged


def _together(readings: Sequence[Reading], servers: Sequence[FoundCommand]) -> Reading:
    """One server. Equal ones are replicas, prefill and decode servers pools, other nodes' ranks those of the first."""
    further = [each.line.pop("further_rank", 0) > 0 or each.line.pop("is_further_rank", False) for each in readings]
    for each in readings:
        each.line.pop("is_further_rank", None)
    if any(further) and not all(further):
        kept = [at for at, is_further in enumerate(further) if not is_further]
        for at in (at for at, is_further in enumerate(further) if is_further):
            readings[kept[0]].notes.append(f"{servers[at].place}: ranks of the same server on another node")
        readings, servers = [readings[at] for at in kept], [servers[at] for at in kept]
    roles = [each.line.pop("role", None) for each in readings]
    if len(readings) > 1 and all(roles):
        return _pools(readings, roles, servers)
    first = readings[0]
    for role, each in zip(roles, readings, strict=True):
        if role is not None:
            what = f"the {role} half of a pair, whose other half is no part of the line"
            each.unmodelled.append((each.sources.get("line.role", role), what))
    different = next((at for at, each in enumerate(readings) if each.data != first.data), None)
    if different is not None:
        raise SpecError(
            f"{servers[different].place}: a second server that differs from the one at {servers[0].place}, and one "
            f"scenario has one; give one of them."
        )
    if len(readings) > 1:
        count = len(readings) * (first.get("cluster.replicas") or 1)
        first.put("cluster.replicas", count, f"{len(readings)} equal servers")
    return first


def _pools(readings: Sequence[Reading], roles: Sequence[str], servers: Sequence[FoundCommand]) -> Reading:
    """Pools of the roles, each engine its own; what they share is written once."""
    if set(roles) != {"prefill", "decode"}:
        raise SpecError(
            f"{servers[0].place}: found {len(roles)} servers of role {roles[0]} alone; KV goes from prefill servers to "
            f"decode servers, give both."
        )
    whole, pools = readings[0], list[dict[str, Any]]()
    engines = [each.data.get("engine", {}) for each in readings]
    shared = {key: value for key, value in engines[0].items() if all(each.get(key) == value for each in engines)}
    for role, engine, reading in zip(roles, engines, readings, strict=True):
        own = {key: value for key, value in engine.items() if key not in shared}
        replicas = reading.get("cluster.replicas") or 1
        pool = {"role": role, "replicas": replicas, "engine": own}
        same = next((each for each in pools if (each["role"], each["engine"]) == (role, own)), None)
        if same is None:
            pools.append(pool)
        else:
            same["replicas"] += replicas
    if len({each.data.get("hardware") for each in readings}) > 1:
        raise SpecError(f"{servers[1].place}: prefill and decode servers on different devices; give --hardware.")
    if len({each.data.get("model") for each in readings}) > 1:
        raise SpecError(f"{servers[1].place}: prefill and decode servers of different models; give one model.")
    whole.data["engine"] = shared
    whole.data["cluster"] = {"pools": pools}
    for reading in readings[1:]:
        whole.add_remarks(reading)
    return whole


def _add_load(base: Reading, loads: Sequence[FoundCommand], script: ShellScript, asking: Asking) -> None:
    command = loads[0]
    if "traffic" in asking.data:
        base.notes.append(f"{command.description.title}: --traffic counts in its place")
        return
    arguments = _with_config(read_arguments(command.words, command.description, command.place), command, script, asking)
    reading = read_server(arguments, {}, command.description, command.place)
    read_load(reading, command.description.name, command.place)
    for block, value in reading.data.items():
        base.data.setdefault(block, value)
    base.sources.update({path: source for path, source in reading.sources.items() if path not in base.sources})
    base.add_remarks(reading)
    if len(loads) > 1:
        base.notes.append(f"{len(loads)} load tests: the first counts ({command.place})")


def _scenario(base: Reading, commands: Sequence[FoundCommand], asking: Asking, has_server: bool) -> LineScenario:
    model = asking.model or base.data.get("model")
    sources = {**base.sources, **asking.sources}
    if model is None:
        what = "the line names no model" if has_server else "the line starts no server"
        raise SpecError(f"{commands[0].place}: {what}; give --model, as in --model llama-3.1-8b.")
    words, is_path = str(model).split(), str(model).startswith(("/", "~", "."))
    if asking.model is None and len(words) != 1 and not is_path:
        raise SpecError(
            f"{commands[0].place}: found {' '.join(words)[:60]!r} where a model's name was expected; words of a "
            f"command stand one by one, or behind sh -c as a script."
        )
    path = expanded(str(model))
    if asking.model is None and is_path and not (may_touch(path) and path.exists()):
        tail = "/".join(Path(str(model)).parts[-2:]).removeprefix("/")
        raise SpecError(
            f"{commands[0].place}: model {model}: a path of the server's, which is not here; say whose files they are, "
            f"as in --model {tail}."
        )
    device = asking.hardware or base.data.get("hardware")
    if device is None:
        raise SpecError(
            f"{commands[0].place}: no device: a line does not say what it runs on; give --hardware, as in --hardware "
            f"h100-sxm-80gb."
        )
    data = {"model": str(model), "hardware": device}
    for block in ("engine", "cluster"):
        if base.data.get(block):
            data[block] = base.data[block]
    for block in ("traffic", "sampling", "slo", "seed"):
        value = asking.data.get(block, base.data.get(block))
        if value not in (None, {}):
            data[block] = value
    return LineScenario(
        data,
        sources,
        tuple(f"{each.description.title} ({each.place})" for each in commands),
        tuple(dict.fromkeys(base.irrelevant)),
        tuple(dict.fromkeys(base.unmodelled)),
        tuple(dict.fromkeys((*base.notes, *_around(commands)))),
        tuple(dict.fromkeys(base.assumed)),
    )


def _around(commands: Sequence[FoundCommand]) -> list[str]:
    """What stood before a command, where anything did."""
    notes = []
    for command in commands:
        words = [
            word
            for word in command.around
            if ("=" not in word or word.startswith("-")) and not (command.version and word == command.image)
        ]
        if words:
            shown = " ".join(words)
            notes.append(
                f"around {command.description.title}, not read: {shown[:200]}{' ...' if len(shown) > 200 else ''}"
            )
    return notes


def scenario_text(scenario: LineScenario) -> str:
    """The text of the file: each field beside the flag that said it, in comments above what is no field."""
    lines = list(_heading(scenario))
    for block, value in scenario.data.items():
        if block in _BLOCKS and isinstance(value, Mapping):
            lines.append(f"{block}:")
            lines += [_field(f"  {key}", f"{block}.{key}", each, scenario.sources) for key, each in value.items()]
        else:
            lines.append(_field(block, block, value, scenario.sources))
    return "\n".join(lines) + "\n"


def _heading(scenario: LineScenario) -> Iterator[str]:
    yield from _comment("Read, not run: ", scenario.commands)
    yield from _comment("Affects time and is not modelled: ", [f"{what} ({why})" for what, why in scenario.unmodelled])
    yield from _comment("Note: ", scenario.notes)
    yield from _comment("Assumed: ", scenario.assumed)
    yield from _comment("No part in time: ", scenario.irrelevant)


def _comment(what: str, items: Any) -> Iterator[str]:
    text = "; ".join(_on_one_line(item) for item in items)
    if text:
        yield from textwrap.wrap(
            f"{what}{text}.", _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )


def _field(key: str, path: str, value: Any, sources: Mapping[str, str]) -> str:
    text = f"{key}: {flow_yaml(value)}"
    texts = [
        source
        for place, source in sources.items()
        if (place == path or place.startswith(f"{path}.")) and source not in ("", value)
    ]
    own = "; ".join(_on_one_line(source) for source in dict.fromkeys(texts))
    return f"{text}  # {own}" if own else text


def _on_one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
