"""From a scenario file to a `Scenario`: names and paths resolved, `--set` applied, everything validated, the model
changed and in its formats, defaults filled in; what the engine does not start with is refused.

Order of authority: `--set`, the scenario file, the files that it names, the defaults. `--set model=...`,
`--set hardware=...` and `--set traffic=...` replace the name; deeper paths change what the named file says.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.base import Spec, default_at
from perfmodel.files.blocks import complete_blocks
from perfmodel.files.catalog import expanded, find_file
from perfmodel.files.device_tables import device_names
from perfmodel.files.reach import is_only_names, may_touch, refused
from perfmodel.files.validation import parse, show_value
from perfmodel.files.yaml_loader import LoadedYaml, Path, Positions, load_yaml
from perfmodel.models.cards import as_asked, load_model
from perfmodel.specs.devices import DeviceSource, find_device, read_device
from perfmodel.specs.engine.devices import default_of
from perfmodel.specs.engine.reading import resolve_engine
from perfmodel.specs.hardware import OWN, HardwareSpec, listed_price
from perfmodel.specs.networks import DEFAULT_NETWORK, find_network
from perfmodel.specs.overrides import (
    Override,
    apply_override,
    as_overrides,
    hardware_places,
    is_removed_link,
    list_position,
    parse_override,
)
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_source import ScenarioSource, as_text, read_scenario, refuse_path_as_name
from perfmodel.specs.traffic import Traffic

_HAS_PLACE = re.compile(r"\S+:\d+: ")


def load_scenario(
    path_or_name: str | pathlib.Path, overrides: Sequence[str] = (), inside: Sequence[str] = ()
) -> Scenario:
    """The scenario in a file, one of workloads/scenarios by name, or its own text (`{model: ..., ...}`), with `--set`
    overrides (`field.path=value`).

    inside: the keys of the block of the file that is the scenario, where the file is of something else (a study)

    Paths inside the file are relative to it. `model_changes`, `engine.dtype` and `engine.quantization` are already
    applied to the model, and `engine.max_model_len` is the model's own where the file gives none.

    Raises SpecError: `file:line: field: what was found, what is allowed`, one line per mistake.
    """
    loaded, folder = read_scenario(path_or_name, inside)
    data, positions = loaded.data, loaded.positions
    changes = [parse_override(text) for text in overrides]
    for change in changes:
        _refuse_model_fields(change)
        if (len(change.path) == 1 or change.path[0] not in ("hardware", "traffic")) and not _is_of_pool(change):
            apply_override(change, data, change.path, positions, partial(_present, data, folder))
    refuse_path_as_name(data, positions)
    complete_blocks(data)
    shared = data.get("hardware")
    _resolve_hardware(data, positions, folder, [c for c in changes if _is_inside("hardware", c)])
    resolve_engine(data.get("engine"), positions, folder, ("engine",))
    _resolve_speculation(data.get("engine"), positions, folder, ("engine",))
    _resolve_pools(data, positions, folder, shared, changes)
    _resolve_traffic(data, positions, folder, [c for c in changes if _is_inside("traffic", c)])
    _resolve_model(data, positions, folder)
    compression = data.get("prompt_compression")
    if isinstance(compression, dict) and compression.get("model") is not None:
        _resolve_model(compression, positions, folder, ("prompt_compression",))
    scenario = parse(Scenario, data, positions)
    scenario._source = ScenarioSource(str(path_or_name), tuple(inside), tuple(overrides))
    return scenario


def changed_scenario(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """`scenario.with_(changes)`: its source, read anew with further overrides. Raises SpecError as `source_of` does."""
    source = source_of(scenario)
    return load_scenario(source.path, (*source.overrides, *as_overrides(changes)), source.inside)


Scenario._read_changed = staticmethod(changed_scenario)


def source_of(scenario: Scenario) -> ScenarioSource:
    """Where `scenario` was read; its own text, if it was made in Python.

    Raises SpecError if no text says the same, as after `model_copy` with a model or a device that no file has.
    """
    if scenario._source.path:
        return scenario._source
    data: dict[str, Any] = {"name": scenario.name, "model": scenario.model.name, "hardware": scenario.hardware.name}
    for field in sorted(scenario.model_fields_set - data.keys()):
        value = getattr(scenario, field)
        data[field] = value.model_dump(mode="json", exclude_unset=True) if isinstance(value, Spec) else value
    source = ScenarioSource(as_text(data))
    try:
        reason = "" if load_scenario(source.path) == scenario else "read again, it is another one"
    except PerfmodelError as error:
        reason = str(error).partition("\n")[0]
    if reason:
        raise SpecError(
            f"{scenario.name}: no text says what this scenario made in Python says ({reason}); write its model and "
            f"device into files, and use load_scenario."
        )
    return source


def named_model(path_or_name: str | pathlib.Path, overrides: Sequence[str] = ()) -> str:
    """The model as the scenario, or `--set model=`, names it: a name, or a path that can be opened from here.

    Raises SpecError as `load_scenario` does.
    """
    loaded, folder = read_scenario(path_or_name)
    for change in map(parse_override, overrides):
        if change.path == ("model",):
            apply_override(change, loaded.data, change.path, loaded.positions)
    return _beside(_name(loaded.data, "model", loaded.positions) or "", folder)


def load_hardware(name_or_path: str | pathlib.Path, overrides: Sequence[str] = ()) -> HardwareSpec:
    """The device of hardware_specs by name or alias, or of a path; overrides start with `hardware.`."""
    return _hardware(find_device(name_or_path), [parse_override(text) for text in overrides])


def list_hardware() -> list[str]:
    """Names of the devices in hardware_specs, sorted."""
    return device_names()


def load_traffic(name_or_path: str | pathlib.Path) -> Traffic:
    """The traffic of a file in workloads/traffic by name, or of a path."""
    loaded = load_yaml(find_file("traffic", name_or_path))
    return _traffic(loaded, pathlib.Path(loaded.positions.file).parent)


def _present(data: dict[str, Any], folder: pathlib.Path, path: Path) -> Any:
    """What is multiplied where the file has nothing at `path`: a field's default, that of the engine's version on the
    device, or what a named network says."""
    if path[:1] == ("engine",) and len(path) == 2 and isinstance(data.get("hardware"), str):
        hardware = _hardware(find_device(_beside(data["hardware"], folder)), ())
        found = default_of(str(path[1]), data.get("engine") or {}, hardware)
        return default_at(Scenario, path) if found is None else found
    around: Any = data
    for key in ("cluster", "network", "link") if path[:2] == ("cluster", "network") else ():
        around = around.get(key) if isinstance(around, dict) else None
    network = find_network(around or DEFAULT_NETWORK) if path[:2] == ("cluster", "network") else None
    found = getattr(network, str(path[-1]), None)
    return default_at(Scenario, path) if found is None else found


def _is_inside(field: str, change: Override) -> bool:
    return len(change.path) > 1 and change.path[0] == field


def _refuse_model_fields(change: Override) -> None:
    if _is_inside("model", change):
        raise SpecError(
            f"--set {change.text}: a model's own fields cannot be set; copy its card or config.json, change it there "
            f"and use --set model=PATH."
        )


def _resolve_hardware(
    data: dict[str, Any], positions: Positions, folder: pathlib.Path, changes: list[Override], prefix: Path = ()
) -> None:
    place = (*prefix, "hardware")
    name = _name(data, "hardware", positions, place)
    if name is None:
        return
    try:
        source = find_device(_beside(name, folder))
    except SpecError as error:
        raise SpecError(f"{positions.where(place)}: {'.'.join(map(str, place))}: {error}") from None
    data["hardware"] = _hardware(source, changes)


def _is_of_pool(change: Override) -> bool:
    """Whether it changes what a pool's hardware file says: cluster.pools.decode.hardware.hbm.bandwidth=2x."""
    return change.path[:2] == ("cluster", "pools") and change.path[3:4] == ("hardware",) and len(change.path) > 4


def _resolve_pools(
    data: dict[str, Any], positions: Positions, folder: pathlib.Path, shared: Any, changes: Sequence[Override]
) -> None:
    """Each pool's hardware by name, and its engine completed by the scenario's.

    shared: the name of the scenario's hardware, which is a pool's as well where its own facts are changed
    """
    cluster = data.get("cluster")
    pools: Any = cluster.get("pools") if isinstance(cluster, dict) else None
    for change in changes:
        if _is_of_pool(change) and list_position(pools, change.path[2]) is None:
            raise SpecError(
                f"--set {change.text}: no pool {change.path[2]!r}; use its position in cluster.pools (from 0), or its "
                f"role where only one has it."
            )
    for index, pool in enumerate(pools if isinstance(pools, list) else []):
        if not isinstance(pool, dict):
            continue  # for validation to say
        own = [each for each in changes if _is_of_pool(each) and list_position(pools, each.path[2]) == index]
        if own and "hardware" not in pool:
            pool["hardware"] = shared
            own = [each for each in changes if _is_inside("hardware", each)] + own
        own = [each._replace(path=each.path[3:]) if _is_of_pool(each) else each for each in own]
        _resolve_hardware(pool, positions, folder, own, ("cluster", "pools", index))
        if pool.get("model") is not None:
            _resolve_model(pool, positions, folder, ("cluster", "pools", index))
        resolve_engine(pool.get("engine"), positions, folder, ("cluster", "pools", index, "engine"))
        _resolve_speculation(pool.get("engine"), positions, folder, ("cluster", "pools", index, "engine"))
        mine, common = pool.get("engine", {}), data.get("engine", {})
        if isinstance(mine, dict) and isinstance(common, dict):
            pool["engine"] = common | mine


def _hardware(source: DeviceSource, changes: Sequence[Override]) -> HardwareSpec:
    loaded = read_device(source)
    if isinstance(loaded.data, dict):
        _complete_price(loaded.data, any(change.path[1:2] == ("price",) for change in changes))
    for change in changes:
        if not _is_inside("hardware", change):
            raise SpecError(
                f"--set {change.text}: only fields of hardware can be set here, as in hardware.hbm.bandwidth."
            )
        for place in hardware_places(change, change.path[1:], loaded.data):
            if is_removed_link(change, place):
                del loaded.data["declared"]["links"][place[2]]
                continue
            apply_override(change, loaded.data, place, loaded.positions)
            if place[:2] == ("declared", "memory") and place[-1] == "capacity_bytes":
                # What a process sees of the old capacity says nothing of the new one.
                loaded.data["declared"]["memory"][place[2]].pop("visible_bytes", None)
    return parse(HardwareSpec, loaded.data, loaded.positions)


def _complete_price(data: dict[str, Any], is_changed: bool) -> None:
    """The device's price where its file has none; one that `--set hardware.price` changes is the user's own."""
    price = data.get("price") or listed_price(str(data.get("name")))
    if is_changed and isinstance(price, dict):
        price = {**{key: price[key] for key in ("usd_per_hour",) if key in price}, "source": OWN}
    if price:
        data["price"] = price


def _resolve_traffic(data: dict[str, Any], positions: Positions, folder: pathlib.Path, changes: list[Override]) -> None:
    if not isinstance(data.get("traffic"), str):
        for change in changes:
            apply_override(change, data, change.path, positions, partial(default_at, Scenario))
        if isinstance(data.get("traffic"), dict):
            _resolve_paths(data["traffic"], folder, positions, ("traffic",))
        return
    try:
        file = find_file("traffic", _beside(data["traffic"], folder))
    except SpecError as error:
        raise SpecError(f"{positions.where(('traffic',))}: traffic: {error}") from None
    loaded = load_yaml(file)
    for change in changes:
        apply_override(change, loaded.data, change.path[1:], loaded.positions, partial(default_at, Traffic))
    data["traffic"] = _traffic(loaded, file.parent)


def _traffic(loaded: LoadedYaml, folder: pathlib.Path) -> Traffic:
    _resolve_paths(loaded.data, folder, loaded.positions, ())
    return parse(Traffic, loaded.data, loaded.positions)


def _resolve_paths(traffic: dict[str, Any], folder: pathlib.Path, positions: Positions, prefix: Path) -> None:
    """Make the paths in a traffic block absolute, relative to the file that holds them; they must exist."""
    for field in ("trace", "input_tokens", "output_tokens"):
        block = traffic.get(field)
        if not isinstance(block, dict) or not isinstance(block.get("path"), str):
            continue
        block["path"] = _file(block["path"], folder, positions, (*prefix, field, "path"))
    talk = traffic.get("conversations")
    for field in ("turns", "tool_tokens"):
        block = talk.get(field) if isinstance(talk, dict) else None
        if isinstance(block, dict) and isinstance(block.get("path"), str):
            block["path"] = _file(block["path"], folder, positions, (*prefix, "conversations", field, "path"))
    if isinstance(traffic.get("prompts"), str) and traffic["prompts"] != "pydoc":
        traffic["prompts"] = _file(traffic["prompts"], folder, positions, (*prefix, "prompts"))


def _file(written: str, folder: pathlib.Path, positions: Positions, place: Path) -> str:
    """The absolute path of a file that must exist, beside the one that names it or from here."""
    path = expanded(written)
    found = next((p for p in (folder / path, path) if may_touch(p) and p.is_file()), None)
    if found is None:
        shown = ".".join(map(str, place))
        if is_only_names():
            raise SpecError(f"{positions.where(place)}: {shown}: {refused(written)}")
        raise SpecError(f"{positions.where(place)}: {shown}: no such file: {written!r} (from {folder}).")
    return str(found.resolve())


def _resolve_speculation(engine: Any, positions: Positions, folder: pathlib.Path, prefix: Path) -> None:
    """The draft model by name, and the file of a measured acceptance."""
    config = engine.get("speculative_config") if isinstance(engine, dict) else None
    if not isinstance(config, dict):
        return
    place = (*prefix, "speculative_config")
    if config.get("model") is not None:
        _resolve_model(config, positions, folder, place)
    acceptance = config.get("acceptance")
    if isinstance(acceptance, dict) and isinstance(acceptance.get("measured"), str):
        acceptance["measured"] = _file(acceptance["measured"], folder, positions, (*place, "acceptance", "measured"))


def _resolve_model(data: dict[str, Any], positions: Positions, folder: pathlib.Path, prefix: Path = ()) -> None:
    place = (*prefix, "model")
    name = _name(data, "model", positions, place)
    if name is None:
        return
    try:
        data["model"] = as_asked(load_model(_beside(name, folder), ask_hub=True), name)
    except SpecError as error:
        if _HAS_PLACE.match(str(error)):
            raise
        raise SpecError(f"{positions.where(place)}: {'.'.join(map(str, place))}: {error}") from None


def _name(data: dict[str, Any], field: str, positions: Positions, place: Path = ()) -> str | None:
    """The name or path in `data[field]`; None where there is none, which validation will report."""
    value = data.get(field)
    if field not in data:
        return None
    if not isinstance(value, str) or not value.strip():
        place = place or (field,)
        shown = ".".join(map(str, place))
        raise SpecError(f"{positions.where(place)}: {shown}: found {show_value(value)}, allowed a name or a path.")
    return value


def _beside(name: str, folder: pathlib.Path) -> str:
    """A path that exists beside the scenario file, else `name` as it is."""
    if "/" not in name and "." not in name:
        return name
    beside = folder / expanded(name)
    if not may_touch(beside):
        return name
    is_there = beside.exists() if "/" in name else beside.is_file()
    return str(beside) if is_there else name
