"""Resolve the `engine` block of a file, including calibrations of one's own server.

`engine.profile: my-h100` is `engine@my-h100.yaml`: beside the scenario, in the working directory, in the folder
`calibrations` of either, or shipped. Kernels fitted with it are beside it (`cpu@my-h100.yaml`). Shipped names are
reserved: a file named like an engine is never read."""

import pathlib
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.base import as_file_name
from perfmodel.files.catalog import data_dir, expanded, find_file, looked_up
from perfmodel.files.sandbox import is_allowed, refuse_path
from perfmodel.files.yaml_loader import Path, Positions, load_yaml
from perfmodel.models.number_formats import kv_format
from perfmodel.specs.engine.description import describe_engine, load_engine_description
from perfmodel.specs.engine.spec import EngineSpec

_PREFIX = "engine@"


def device_file(calibration: str | pathlib.Path, device: str) -> pathlib.Path:
    """Kernel fits that belong to a profile: `cpu@mine.yaml` beside `engine@mine.yaml`."""
    path = pathlib.Path(calibration)
    return path.with_name(f"{device}@{path.name.removeprefix(_PREFIX)}")


def refuse_shipped_name(name: str) -> None:
    """Raise SpecError for invalid file names and names of engines or shipped calibrations."""
    try:
        as_file_name(name)
    except ValueError as error:
        raise SpecError(f"--name: {error}.") from None
    shipped = data_dir("calibrations") / f"{_PREFIX}{name}.yaml"
    if "@" in name or looked_up("engines", name) is not None or shipped.exists():
        raise SpecError(
            f"--name {name}: is what a shipped engine is called; call your server otherwise, as in my-h100."
        )


def resolve_engine(engine: Any, positions: Positions, folder: pathlib.Path, place: Path) -> None:
    """Resolve and check names in the mapping `engine` in place; validation checks the rest.

    positions: for errors; folder: base of relative paths; place: of `engine` in the file
    Raises SpecError with file, line, field and the nearest name for unknown engines, undescribed versions, KV formats.
    """
    if not isinstance(engine, dict):
        return
    if engine.get("version") is not None:
        engine["version"] = positions.written((*place, "version")) or engine["version"]
    field: Path = ("profile",)
    try:
        if isinstance(engine.get("profile"), str):
            own = _user_calibration(engine["profile"], folder)
            if own is not None:
                engine |= {"profile": _engine_of(own), "calibration": str(own.resolve())}
            engine["profile"] = _profile(engine["profile"], folder)
        for name in ("calibration", "cpu"):  # which are read when something is timed
            field = (name,)
            if isinstance(engine.get(name), str):
                refuse_path(pathlib.Path(engine[name]) if name == "calibration" else engine[name])
        field = ("version",)
        if isinstance(engine.get("version"), str):
            _check_version(engine.get("profile") or EngineSpec.model_fields["profile"].default, engine["version"])
        tiers = engine.get("kv_tiers")
        formats: dict[Path, Any] = {("kv_cache_dtype",): engine.get("kv_cache_dtype")}
        for number, tier in enumerate(tiers if isinstance(tiers, list) else []):
            formats["kv_tiers", number, "dtype"] = tier.get("dtype") if isinstance(tier, dict) else None
        for field_of_format, form in formats.items():
            field = field_of_format
            if isinstance(form, str) and form != "auto":
                kv_format(form)
    except SpecError as error:
        raise positions.error((*place, *field), error) from None


def _user_calibration(name: str, folder: pathlib.Path) -> pathlib.Path | None:
    """Calibration file by name or path; None for an engine's name or if missing."""
    path = folder / expanded(name)
    if path.name.startswith(_PREFIX) and is_allowed(path) and path.is_file():
        return path
    if "/" in name or "\\" in name or looked_up("engines", name) is not None:
        return None
    own = (base / inner for base in (folder, pathlib.Path.cwd()) for inner in ("", "calibrations"))
    files = (place / f"{_PREFIX}{name}.yaml" for place in (*own, data_dir("calibrations")))
    return next((file for file in files if is_allowed(file) and file.is_file()), None)


def _engine_of(calibration: pathlib.Path) -> str:
    engine = load_yaml(calibration).data.get("engine")
    if not isinstance(engine, str) or looked_up("engines", engine) is None:
        raise SpecError(f"{calibration}: its `engine` is {engine!r}; expected the name of a shipped engine, as in vllm")
    return engine


def _profile(name: str, folder: pathlib.Path) -> str:
    """Engine name, or the path of a user's file."""
    sibling = folder / expanded(name)
    file = find_file("engines", sibling if is_allowed(sibling) and sibling.is_file() else name)
    shipped = load_engine_description(file).name
    try:
        return shipped if find_file("engines", shipped).samefile(file) else str(file.resolve())
    except SpecError:
        return str(file.resolve())


def _check_version(profile: str, version: str) -> None:
    engine = describe_engine(profile, version)
    description, chosen = engine.description, engine.version
    if not description.versions:
        raise SpecError(f"{description.name} has no versions; leave it out")
    if chosen.age != "described":
        raise SpecError(
            f"{chosen.note}; set it to {chosen.described}, or describe what changed in "
            f"hardware_specs/engines/{description.name}.yaml (described: {', '.join(description.versions)})"
        )
