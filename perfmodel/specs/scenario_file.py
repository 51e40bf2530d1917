"""From a scenario file to a validated `Scenario`: names and paths resolved, `--set` applied.

Precedence: `--set`, the scenario file, files that it names, defaults. `--set model=...`, `--set hardware=...` and
`--set traffic=...` replace the name; deeper paths change the named file's values."""

import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.base import Spec, as_file_name, default_at
from perfmodel.files.blocks import complete_blocks
from perfmodel.files.catalog import expanded, find_file
from perfmodel.files.device_tables import DeviceSource, device_names
from perfmodel.files.sandbox import is_allowed, is_only_names, refused
from perfmodel.files.validation import parse, show_value
from perfmodel.files.yaml_loader import Path, Positions, load_yaml
from perfmodel.models.cards import as_asked, load_model
from perfmodel.models.spec import ModelSpec
from perfmodel.specs import overrides as edits
from perfmodel.specs.devices import find_device, read_device
from perfmodel.specs.engine.devices import default_of
from perfmodel.specs.engine.reading import resolve_engine
from perfmodel.specs.hardware import OWN, HardwareSpec, listed_price
from perfmodel.specs.networks import DEFAULT_NETWORK, find_network
from perfmodel.specs.overrides import Override, apply_override, parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_source import ScenarioSource, as_text, read_scenario
from perfmodel.specs.traffic import Traffic

_HAS_PLACE = re.compile(r"\S+:\d+: ")
# Places of files in a description of traffic.
_FILES: tuple[Path, ...] = (
    *((field, "path") for field in ("trace", "input_tokens", "output_tokens")),
    *(("conversations", field, "path") for field in ("turns", "tool_tokens")),
)


def load_scenario(
    path_or_name: str | pathlib.Path, overrides: Sequence[str] = (), inside: Sequence[str] = ()
) -> Scenario:
    """Scenario from a file, a name in workloads/scenarios, or its own text (`{model: ..., ...}`), with overrides.

    inside: keys of the block that is the scenario, in a file of another kind (a study)

    Paths are relative to the file. `model_changes`, `engine.dtype` and `engine.quantization` are applied to the model;
    `engine.max_model_len` defaults to the model's. Raises SpecError: `file:line: field: got X; expected Y` lines."""
    loaded, folder = read_scenario(path_or_name, inside)
    data, positions = loaded.data, loaded.positions
    changes = [parse_override(text) for text in overrides]
    inner: dict[str, list[Override]] = {"hardware": [], "traffic": []}  # of what the named files say
    for change in changes:
        block, *rest = change.path
        if block == "model" and rest:
            raise SpecError(
                f"--set {change.text}: a model's own fields cannot be set; copy its card or config.json, change it "
                f"there and use --set model=PATH."
            )
        if block in inner and rest:
            inner[block].append(change)
        elif not _is_of_pool(change):
            apply_override(change, data, change.path, positions, partial(_present, data, folder))
    names, shared = _Names(data, positions, folder), data.get("hardware")
    try:
        as_file_name(data["name"] if isinstance(data["name"], str) else "-")  # what is no text, validation will report
    except ValueError as error:
        raise positions.error(("name",), f"{error}.") from None
    complete_blocks(data)
    names.resolve_hardware((), inner["hardware"])
    names.resolve_engine(())
    names.resolve_pools(shared, changes, inner["hardware"])
    names.resolve_traffic(inner["traffic"])
    names.replace(("model",), names.model)
    names.replace(("prompt_compression", "model"), names.model, is_optional=True)
    scenario = parse(Scenario, data, positions)
    scenario._source = ScenarioSource(str(path_or_name), tuple(inside), tuple(overrides))
    return scenario


def changed_scenario(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """`scenario.with_(changes)`: its source with further overrides; of a block that is given whole, earlier ones of its
    fields are gone. Raises SpecError as `source_of` does."""
    source = source_of(scenario)
    blocks = tuple(f"{field}." for field, value in changes.items() if isinstance(value, Mapping))
    kept = [text for text in source.overrides if not text.startswith(blocks)]
    return load_scenario(source.path, (*kept, *edits.as_overrides(changes)), source.inside)


Scenario._read_changed = staticmethod(changed_scenario)


def source_of(scenario: Scenario) -> ScenarioSource:
    """Source of `scenario`, or its own text if made in Python. Raises SpecError if no text says the same, as after
    `model_copy` with a model or device that no file has."""
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
    """The scenario's model (or `--set model=`) as a name or openable path. Raises SpecError as `load_scenario` does."""
    loaded, folder = read_scenario(path_or_name)
    for change in map(parse_override, overrides):
        if change.path == ("model",):
            apply_override(change, loaded.data, change.path, loaded.positions)
    names = _Names(loaded.data, loaded.positions, folder)
    names.replace(("model",), names.sibling)
    return str(loaded.data.get("model", ""))


def load_hardware(name_or_path: str | pathlib.Path, overrides: Sequence[str] = ()) -> HardwareSpec:
    """Device by name, alias or path; overrides start with `hardware.`."""
    return _hardware(find_device(name_or_path), [parse_override(text) for text in overrides])


def list_hardware() -> list[str]:
    """Sorted device names in hardware_specs."""
    return device_names()


def load_traffic(name_or_path: str | pathlib.Path) -> Traffic:
    """Traffic by name in workloads/traffic, or by path."""
    return _traffic(find_file("traffic", name_or_path), ())


def _present(data: dict[str, Any], folder: pathlib.Path, path: Path) -> Any:
    """Value to multiply where the file has none at `path`: a default of the field, engine version or named network."""
    value = None
    if path[:1] == ("engine",) and len(path) == 2 and isinstance(data.get("hardware"), str):
        hardware = _hardware(find_device(_beside(data["hardware"], folder)), ())
        value = default_of(str(path[1]), data.get("engine") or {}, hardware)
    elif path[:2] == ("cluster", "network"):
        link: Any = data
        for key in ("cluster", "network", "link"):
            link = link.get(key) if isinstance(link, dict) else None
        value = getattr(find_network(link or DEFAULT_NETWORK), str(path[-1]), None)
    return default_at(Scenario, path) if value is None else value


def _is_of_pool(change: Override) -> bool:
    """Whether it changes a pool's hardware: cluster.pools.decode.hardware.hbm.bandwidth=2x."""
    return change.path[:2] == ("cluster", "pools") and change.path[3:4] == ("hardware",) and len(change.path) > 4


@dataclass(frozen=True, slots=True)
class _Names:
    """Replaces names and paths (relative to `folder`) in a scenario's mapping by their content."""

    data: dict[str, Any]
    positions: Positions
    folder: pathlib.Path

    def sibling(self, name: str) -> str:
        return _beside(name, self.folder)

    def model(self, name: str) -> ModelSpec:
        return as_asked(load_model(self.sibling(name), ask_hub=True), name)

    def block(self, place: Path) -> dict[str, Any]:
        block: Any = self.data
        for key in place:
            block = block[key] if isinstance(key, int) else block.get(key) if isinstance(block, dict) else None
        return block if isinstance(block, dict) else {}

    def replace(self, place: Path, read: Callable[[str], Any], is_optional: bool = False) -> None:
        """Replace the name at `place` by `read(name)`; validation reports a missing one. is_optional: may be null."""
        block, key = self.block(place[:-1]), str(place[-1])
        if key not in block or (is_optional and block[key] is None):
            return
        if not isinstance(block[key], str) or not block[key].strip():
            raise self.positions.error(place, f"got {show_value(block[key])}; expected a name or a path.")
        try:
            block[key] = read(block[key])
        except SpecError as error:
            if _HAS_PLACE.match(str(error)):
                raise
            raise self.positions.error(place, error) from None

    def resolve_file(self, place: Path) -> None:
        """Make the path of an existing file absolute, relative to the naming file or the working directory."""
        block, key = self.block(place[:-1]), str(place[-1])
        written = block.get(key)
        if not isinstance(written, str):
            return
        path = expanded(written)
        file = next((p for p in (self.folder / path, path) if is_allowed(p) and p.is_file()), None)
        if file is None:
            missing = f"no such file: {written!r} (from {self.folder})."
            raise self.positions.error(place, refused(written) if is_only_names() else missing)
        block[key] = str(file.resolve())

    def resolve_hardware(self, prefix: Path, changes: Sequence[Override]) -> None:
        self.replace((*prefix, "hardware"), lambda name: find_device(self.sibling(name)))
        block = self.block(prefix)
        if "hardware" in block:
            block["hardware"] = _hardware(block["hardware"], changes)

    def resolve_engine(self, prefix: Path) -> None:
        place = (*prefix, "engine")
        resolve_engine(self.block(prefix).get("engine"), self.positions, self.folder, place)
        self.replace((*place, "speculative_config", "model"), self.model, is_optional=True)
        self.resolve_file((*place, "speculative_config", "acceptance", "measured"))

    def resolve_pools(self, shared: Any, changes: Sequence[Override], of_hardware: Sequence[Override]) -> None:
        """Resolve each pool's hardware and complete its engine from the scenario's.

        shared: hardware name that pools share; changes, of_hardware: all overrides, those of the scenario's hardware"""
        pools: Any = self.block(("cluster",)).get("pools")
        own: dict[int | None, list[Override]] = {}
        for change in filter(_is_of_pool, changes):
            position = edits.list_position(pools, change.path[2])
            if position is None:
                raise SpecError(
                    f"--set {change.text}: no pool {change.path[2]!r}; use its position in cluster.pools (from 0), or "
                    f"its role where only one has it."
                )
            own.setdefault(position, []).append(change._replace(path=change.path[3:]))
        for index, pool in enumerate(pools if isinstance(pools, list) else []):
            if not isinstance(pool, dict):
                continue  # for validation to report
            place, of_pool = ("cluster", "pools", index), own.get(index, [])
            if of_pool and "hardware" not in pool:
                pool["hardware"] = shared
                of_pool = [*of_hardware, *of_pool]
            self.resolve_hardware(place, of_pool)
            self.replace((*place, "model"), self.model, is_optional=True)
            self.resolve_engine(place)
            engine, common = pool.get("engine", {}), self.data.get("engine", {})
            if isinstance(engine, dict) and isinstance(common, dict):
                pool["engine"] = common | engine

    def resolve_traffic(self, changes: Sequence[Override]) -> None:
        if isinstance(self.data.get("traffic"), str):
            self.replace(("traffic",), lambda name: find_file("traffic", self.sibling(name)))
            self.data["traffic"] = _traffic(self.data["traffic"], changes)
            return
        for change in changes:
            apply_override(change, self.data, change.path, self.positions, partial(default_at, Scenario))
        self.resolve_files(("traffic",))

    def resolve_files(self, prefix: Path) -> None:
        for place in _FILES:
            self.resolve_file((*prefix, *place))
        if self.block(prefix).get("prompts") != "pydoc":
            self.resolve_file((*prefix, "prompts"))


def _hardware(source: DeviceSource, changes: Sequence[Override]) -> HardwareSpec:
    loaded = read_device(source)
    data = loaded.data
    # The price of the list where the file has none; one that `--set hardware.price` changes is the user's own.
    price = data.get("price") or listed_price(str(data.get("name")))
    if isinstance(price, dict) and any(change.path[1:2] == ("price",) for change in changes):
        price = {**{key: price[key] for key in ("usd_per_hour",) if key in price}, "source": OWN}
    if price:
        data["price"] = price
    for change in changes:
        if change.path[0] != "hardware" or len(change.path) < 2:
            raise SpecError(
                f"--set {change.text}: only fields of hardware can be set here, as in hardware.hbm.bandwidth."
            )
        for place in edits.hardware_places(change, change.path[1:], data):
            is_link = len(place) == 3 and place[:2] == ("declared", "links") and isinstance(place[2], int)
            if is_link and change.factor is None and change.value is None:
                del data["declared"]["links"][place[2]]
                continue
            apply_override(change, data, place, loaded.positions)
            if place[:2] == ("declared", "memory") and place[-1] == "capacity_bytes":
                # What a process sees of the old capacity says nothing of the new one.
                data["declared"]["memory"][place[2]].pop("visible_bytes", None)
    whole = parse(HardwareSpec, data, loaded.positions)
    try:
        return whole if source.slice is None else whole.sliced(source.slice)
    except ValueError as error:
        raise SpecError(f"{error}.") from None


def _traffic(file: pathlib.Path, changes: Sequence[Override]) -> Traffic:
    loaded = load_yaml(file)
    for change in changes:
        apply_override(change, loaded.data, change.path[1:], loaded.positions, partial(default_at, Traffic))
    _Names(loaded.data, loaded.positions, file.parent).resolve_files(())
    return parse(Traffic, loaded.data, loaded.positions)


def _beside(name: str, folder: pathlib.Path) -> str:
    """A path beside the scenario file if it exists, else `name`."""
    sibling = folder / expanded(name) if "/" in name or "." in name else None
    if sibling is None or not is_allowed(sibling):
        return name
    is_there = sibling.exists() if "/" in name else sibling.is_file()
    return str(sibling) if is_there else name
