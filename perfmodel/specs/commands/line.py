"""Command lines of a server and a load test to a scenario; nothing is executed.

Flags that are irrelevant or not modelled are listed, never dropped silently."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import expanded
from perfmodel.files.sandbox import is_allowed, refused
from perfmodel.files.yaml_loader import flow_yaml, load_yaml, load_yaml_text
from perfmodel.specs.commands.arguments import Arguments
from perfmodel.specs.commands.description import all_commands
from perfmodel.specs.commands.finding import FoundCommand, find_commands
from perfmodel.specs.commands.load import read_load
from perfmodel.specs.commands.manifests import is_manifest, read_manifest
from perfmodel.specs.commands.server import Reading, complete, read_server
from perfmodel.specs.commands.shell import ShellScript, read_shell
from perfmodel.specs.devices import find_device
from perfmodel.specs.engine.description import describe_engine
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.shorthand import name_of

_MAX_SERVERS = 64
_WIDTH = 110  # of comments in the written file
_BLOCKS = ("engine", "cluster", "traffic", "slo", "sampling")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True)
class Asking:
    """Inputs beside the line.

    model, traffic: override the line's; hardware: devices; data: blocks that precede the line's (traffic, slo)"""

    model: str | None = None
    hardware: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=Path)  # that files which the line names are in


@dataclass(frozen=True, slots=True)
class LineScenario:
    """data: of the scenario file; sources: field -> words that set it; commands: lines and where they stand.

    irrelevant, unmodelled, notes, assumed: see `Reading`"""

    data: dict[str, Any]
    sources: Mapping[str, str]
    commands: tuple[str, ...]
    irrelevant: tuple[str, ...]
    unmodelled: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    assumed: tuple[str, ...]


def read_line(text: str, asking: Asking, place: str = "line") -> LineScenario:
    """Scenario of a command line, script or compose file; `asking` has what it does not say, `place` its name in errors

    Raises SpecError in one sentence: for an unknown flag (with the nearest), `$(...)`, unset variables, missing values.
    """
    script = read_manifest(text, place) if is_manifest(text) else read_shell(text, place)
    commands = find_commands(script, place)
    servers = [command for command in commands if command.description.role == "server"]
    loads = [command for command in commands if command.description.role == "load"]
    if not commands:
        known = ", ".join(f"`{command.title}`" for command in all_commands())
        first = next((" ".join(command.words[:3]) for command in script.commands if command.words), "")
        begins = f"it begins with {first!r}" if first else "it is empty"
        raise SpecError(f"{place}: unrecognized command ({begins}); supported: {known}.")
    readings = [_read_server(command, script, asking) for command in servers[:_MAX_SERVERS]]
    base = _together(readings, servers) if readings else Reading()
    if loads:
        _add_load(base, loads, script, asking)
    return _scenario(base, [*servers, *loads[:1]], asking)


def _read_server(command: FoundCommand, script: ShellScript, asking: Asking) -> Reading:
    description = command.description
    reading = read_server(_arguments(command, script, asking), command.environment)
    assert description.engine is not None
    complete(reading, description.name, description.engine)
    _place(reading, command, asking.hardware)
    if command.version is not None:
        chosen = describe_engine(description.engine, command.version).version
        if chosen.age == "described":
            reading.put("engine.version", command.version, f"the image {command.image}")
        else:
            reading.notes.append(f"the image {command.image}: {chosen.note}")
    return reading


def _place(reading: Reading, command: FoundCommand, hardware: str | None) -> None:
    """Add a manifest's replicas and device; note mismatches and what `hardware` replaces."""
    placement = command.placement
    if placement.replicas is not None:
        reading.put("cluster.replicas", placement.replicas, f"replicas: {placement.replicas}")
    if placement.scaler is not None:
        reading.notes += placement.scaler.notes
        if placement.scaler.fields is not None:
            reading.put("cluster.autoscaling", placement.scaler.fields, placement.scaler.name)
    if placement.device is not None:
        nodes = f"nodes with {placement.device}"
        try:
            find_device(placement.device)
        except SpecError as error:
            if hardware is None:
                raise SpecError(f"{command.place}: {nodes}: {error} Or give --hardware.") from None
            reading.notes.append(f"Not read: {nodes}, which is no device of hardware_specs")
        else:
            device = name_of("hardware", placement.device)
            if hardware is None:
                reading.put("hardware", device, nodes)
            elif name_of("hardware", hardware) != device:
                reading.notes.append(f"{nodes}: --hardware {hardware} replaces it")
    engine = EngineSpec.model_validate({key: reading.get(f"engine.{key}") or 1 for key in _PARALLEL})
    pods = placement.size or 1
    if placement.gpus is not None and placement.gpus * pods != engine.num_devices:
        given = f"{placement.gpus} GPUs" if pods == 1 else f"{pods} pods of {placement.gpus} GPUs"
        reading.notes.append(f"the manifest gives {given} to a server that uses {engine.num_devices}")
    elif placement.gpus is None and placement.size is not None:
        reading.notes.append(f"Not read: size: {placement.size} of a group, whose pods name no GPUs")


def _arguments(command: FoundCommand, script: ShellScript, asking: Asking) -> Arguments:
    """Flags of the line and its `--config` file, in the engine's order of precedence."""
    description, place = command.description, command.place
    arguments = Arguments(description, place).read(command.words)
    name = next((name for name in description.config if name in arguments.given), None)
    if name is None:
        return arguments
    given = arguments.given.pop(name)
    file = str(given.value)
    files = {**script.files, **command.files}
    written = (files.get(name) for name in (file, f"./{file}", file.removeprefix("./")))
    text = next((text for text in written if text is not None), None)
    path = asking.folder / expanded(file)
    if text is None and not is_allowed(path):
        raise SpecError(f"{place}: {given.written}: {refused(file)}")
    if text is None and not isfile(path):  # Path.is_file raises OSError for a name that is too long
        raise SpecError(
            f"{place}: {given.written[:100]}: no such file beside the line ({str(path)[:300]}); put it there, or give "
            f"its flags in the line."
        )
    loaded = load_yaml_text(text, file) if text is not None else load_yaml(path)
    of_file = Arguments(description, file).read_mapping(loaded.data)
    merged, after = (arguments, of_file) if description.config_wins else (of_file, arguments)
    merged.notes += after.notes
    for flag in after.given.values():
        merged.add(flag)
    return merged


def _together(readings: Sequence[Reading], servers: Sequence[FoundCommand]) -> Reading:
    """Merge servers: equal ones are replicas, prefill and decode ones pools, other nodes' ranks part of the first."""
    ranks = [(reading.take("further_rank", 0) > 0, reading.take("is_further_rank", False)) for reading in readings]
    first_nodes = [at for at, is_further in enumerate(ranks) if not any(is_further)]
    if 0 < len(first_nodes) < len(readings):
        readings[first_nodes[0]].notes += [
            f"{server.place}: ranks of the same server on another node"
            for server, is_further in zip(servers, ranks, strict=False)
            if any(is_further)
        ]
        readings, servers = [readings[at] for at in first_nodes], [servers[at] for at in first_nodes]
    first = readings[0]
    roles = [reading.take("role") for reading in readings]
    if len(readings) > 1 and all(roles):
        return _pools(readings, roles, servers)
    for role, reading in zip(roles, readings, strict=True):
        if role is not None:
            what = f"the {role} half of a pair, whose other half is no part of the line"
            reading.unmodelled.append((reading.source("role") or role, what))
    different = next((at for at, reading in enumerate(readings) if reading.data != first.data), None)
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
    """Pools by role, each with its engine; common fields written once."""
    if set(roles) != {"prefill", "decode"}:
        raise SpecError(
            f"{servers[0].place}: got {len(roles)} servers of role {roles[0]} alone; KV goes from prefill servers to "
            f"decode servers, give both."
        )
    differences = {"hardware": "on different devices; give --hardware", "model": "of different models; give one model"}
    for name, what in differences.items():
        if len({reading.data.get(name) for reading in readings}) > 1:
            raise SpecError(f"{servers[1].place}: prefill and decode servers {what}.")
    first, *others = readings
    engines = [reading.data.get("engine", {}) for reading in readings]
    shared = {key: value for key, value in engines[0].items() if all(own.get(key) == value for own in engines)}
    pools: list[dict[str, Any]] = []
    for role, engine, reading in zip(roles, engines, readings, strict=True):
        own = {key: value for key, value in engine.items() if key not in shared}
        replicas, scaling = reading.get("cluster.replicas") or 1, reading.get("cluster.autoscaling")
        pool = {"role": role, "replicas": replicas, "engine": own}
        pool |= {} if scaling is None else {"autoscaling": scaling}
        same = next((known for known in pools if {**known, "replicas": replicas} == pool), None)
        if same is None:
            pools.append(pool)
        else:
            same["replicas"] += replicas
    first.data |= {"engine": shared, "cluster": {"pools": pools}}
    for reading in others:
        first.add_remarks(reading)
    return first


def _add_load(base: Reading, loads: Sequence[FoundCommand], script: ShellScript, asking: Asking) -> None:
    command = loads[0]
    if "traffic" in asking.data:
        base.notes.append(f"{command.description.title}: --traffic counts in its place")
        return
    reading = read_server(_arguments(command, script, asking), {})
    read_load(reading, command.description.name, command.place)
    base.data = reading.data | base.data
    base.sources |= {path: source for path, source in reading.sources.items() if path not in base.sources}
    base.add_remarks(reading)
    if len(loads) > 1:
        base.notes.append(f"{len(loads)} load tests: the first counts ({command.place})")


def _scenario(base: Reading, commands: Sequence[FoundCommand], asking: Asking) -> LineScenario:
    place, model = commands[0].place, asking.model or base.data.get("model")
    if model is None:
        starts = commands[0].description.role == "server"
        what = "the line names no model" if starts else "the line starts no server"
        raise SpecError(f"{place}: {what}; give --model, as in --model llama-3.1-8b.")
    if asking.model is None:
        _check_model(str(model), place)
    device = asking.hardware or base.data.get("hardware")
    if device is None:
        raise SpecError(
            f"{place}: no device: a line does not say what it runs on; give --hardware, as in --hardware h100-sxm-80gb."
        )
    data = {"model": str(model), "hardware": device}
    given = {block: base.data.get(block) for block in ("engine", "cluster")}
    given |= {block: asking.data.get(block, base.data.get(block)) for block in ("traffic", "sampling", "slo", "seed")}
    return LineScenario(
        data | {block: value for block, value in given.items() if value not in (None, {})},
        {**base.sources, **asking.sources},
        tuple(f"{command.description.title} ({command.place})" for command in commands),
        tuple(dict.fromkeys(base.irrelevant)),
        tuple(dict.fromkeys(base.unmodelled)),
        tuple(dict.fromkeys((*base.notes, *_around(commands)))),
        tuple(dict.fromkeys(base.assumed)),
    )


def _check_model(model: str, place: str) -> None:
    """Raise SpecError for several words or another machine's path as the model."""
    is_path = model.startswith(("/", "~", "."))
    if len(model.split()) != 1 and not is_path:
        raise SpecError(
            f"{place}: got {' '.join(model.split())[:60]!r} where a model's name was expected; words of a command "
            f"stand one by one, or behind sh -c as a script."
        )
    path = expanded(model)
    if is_path and not (is_allowed(path) and path.exists()):
        tail = "/".join(Path(model).parts[-2:]).removeprefix("/")
        raise SpecError(
            f"{place}: model {model}: a path of the server's, which is not here; say whose files they are, as in "
            f"--model {tail}."
        )


def _around(commands: Sequence[FoundCommand]) -> Iterator[str]:
    for command in commands:
        shown = " ".join(
            word
            for word in command.around
            if ("=" not in word or word.startswith("-")) and not (command.version and word == command.image)
        )
        if shown:
            yield f"around {command.description.title}, not read: {shown[:200]}{' ...' if len(shown) > 200 else ''}"


def scenario_text(scenario: LineScenario) -> str:
    """File text: each field with its flag, and comments on top for everything else."""
    remarks: dict[str, Iterable[str]] = {
        "Read, not run": scenario.commands,
        "Affects time and is not modelled": [f"{what} ({why})" for what, why in scenario.unmodelled],
        "Note": scenario.notes,
        "Assumed": scenario.assumed,
        "No part in time": scenario.irrelevant,
    }
    lines = []
    for what, items in remarks.items():
        if text := "; ".join(map(_on_one_line, items)):
            wrapper = textwrap.TextWrapper(_WIDTH, "# ", "#   ", break_on_hyphens=False)
            lines += wrapper.wrap(f"{what}: {text}.")
    for block, value in scenario.data.items():
        if block in _BLOCKS and isinstance(value, Mapping):
            lines.append(f"{block}:")
            lines += [_field(f"  {key}", f"{block}.{key}", own, scenario.sources) for key, own in value.items()]
        else:
            lines.append(_field(block, block, value, scenario.sources))
    return "\n".join(lines) + "\n"


def _field(key: str, path: str, value: Any, sources: Mapping[str, str]) -> str:
    given = {place: source for place, source in sources.items() if place == path or place.startswith(f"{path}.")}
    texts = dict.fromkeys(source for source in given.values() if source not in ("", value))
    comment = "; ".join(map(_on_one_line, texts))
    return f"{key}: {flow_yaml(value)}{f'  # {comment}' if comment else ''}"


def _on_one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
