"""The names that a scenario file has under `engine`, looked up: the engine, its version, the KV cache's format."""

__all__ = ["resolve_engine"]

import pathlib
from collections.abc import Iterator
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import expanded, find_file
from perfmodel.files.reach import may_touch, refuse_path
from perfmodel.files.yaml_loader import Path, Positions
from perfmodel.models.number_formats import kv_format
from perfmodel.specs.engine.description import EngineDescription, describe_engine, load_engine_description
from perfmodel.specs.engine.own_calibration import own_calibration
from perfmodel.specs.engine.spec import EngineSpec


def resolve_engine(engine: Any, positions: Positions, folder: pathlib.Path, place: Path) -> None:
    """Replace the names in the mapping `engine` by those of files, and check them; validation sees to all else.

    engine:    what the file has there, changed in place
    positions: of the file's fields
    folder:    that paths in the file are relative to
    place:     of `engine` in the file

    Raises SpecError with file, line, field and the nearest right name for an unknown engine, a version that nobody has
    described, and an unknown format of the KV cache.
    """
    if not isinstance(engine, dict):
        return
    if "version" in engine:
        written = positions.written((*place, "version"))
        engine["version"] = engine["version"] if written is None or engine["version"] is None else written
    try:
        field: Path = ("profile",)
        if isinstance(engine.get("profile"), str):
            own = own_calibration(engine["profile"], folder)
            if own is not None:
                engine |= {"profile": own.engine, "calibration": str(own.file)}
            engine["profile"] = _profile(engine["profile"], folder)
        for name in ("calibration", "cpu"):  # which are read when something is timed
            field = (name,)
            if isinstance(engine.get(name), str):
                refuse_path(pathlib.Path(engine[name]) if name == "calibration" else engine[name])
        field = ("version",)
        if isinstance(engine.get("version"), str):
            _check_version(engine.get("profile") or EngineSpec.model_fields["profile"].default, engine["version"])
        for place_of_format, name in _kv_formats(engine):
            field = place_of_format
            if name != "auto":
                kv_format(name)
    except SpecError as error:
        where = (*place, *field)
        raise SpecError(f"{positions.where(where)}: {'.'.join(map(str, where))}: {error}") from None


def _profile(name: str, folder: pathlib.Path) -> str:
    """The engine's name; of a file that is none of ours, its path."""
    beside = folder / expanded(name)
    file = find_file("engines", beside if may_touch(beside) and beside.is_file() else name)
    own = load_engine_description(file).name
    try:
        return own if find_file("engines", own).samefile(file) else str(file.resolve())
    except SpecError:
        return str(file.resolve())


def _check_version(profile: str, version: str) -> None:
    found = describe_engine(profile, version)
    description, chosen = found.description, found.version
    if not description.versions:
        raise SpecError(f"{description.name} has no versions; leave it out")
    if chosen.age != "described":
        raise SpecError(f"{chosen.note}; {_way_out(description, chosen.described)}")


def _way_out(description: EngineDescription, nearest: str) -> str:
    return (
        f"set it to {nearest}, or describe what changed in hardware_specs/engines/{description.name}.yaml "
        f"(described: {', '.join(description.versions)})"
    )


def _kv_formats(engine: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Places and names of the formats of cached tokens."""
    if isinstance(engine.get("kv_cache_dtype"), str):
        yield ("kv_cache_dtype",), engine["kv_cache_dtype"]
    tiers = engine.get("kv_tiers")
    for number, tier in enumerate(tiers if isinstance(tiers, list) else []):
        if isinstance(tier, dict) and isinstance(tier.get("dtype"), str):
            yield ("kv_tiers", number, "dtype"), tier["dtype"]
