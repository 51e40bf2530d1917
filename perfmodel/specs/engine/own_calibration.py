"""Where the calibration of one's own server is: `engine.profile: my-h100` names `engine@my-h100.yaml`.

Looked for beside the scenario, then in the working directory, in both also in their folder `calibrations`, then among
the shipped ones. Kernels of a device that were fitted with it are in a file beside it (`cpu@my-h100.yaml`). What ships
has its name to itself: a file called like an engine is never read.
"""

__all__ = ["OwnCalibration", "device_file", "own_calibration", "refuse_shipped_name"]

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.files.base import as_file_name
from perfmodel.files.catalog import data_dir, expanded, looked_up
from perfmodel.files.reach import may_touch
from perfmodel.files.yaml_loader import load_yaml

_PREFIX = "engine@"


@dataclass(frozen=True)
class OwnCalibration:
    """Its file, and the engine that it is of."""

    file: Path
    engine: str


def own_calibration(name: str, folder: Path) -> OwnCalibration | None:
    """The calibration called `name`, or in the file of this path; None where an engine is called so, or nothing is.

    folder: of the scenario. Raises SpecError for a file that does not say of which engine it is.
    """
    path = folder / expanded(name)
    if path.name.startswith(_PREFIX) and may_touch(path) and path.is_file():
        return _read(path)
    if "/" in name or "\\" in name or looked_up("engines", name) is not None:
        return None
    return next((_read(file) for file in _places(name, folder) if may_touch(file) and file.is_file()), None)


def device_file(calibration: str | Path, device: str) -> Path:
    """Where the kernels of a device are that were fitted with a profile: `cpu@mine.yaml` beside `engine@mine.yaml`."""
    path = Path(calibration)
    return path.with_name(f"{device}@{path.name.removeprefix(_PREFIX)}")


def refuse_shipped_name(name: str) -> None:
    """Raises SpecError for what is no name of a file, and for what an engine or a shipped calibration is called."""
    try:
        as_file_name(name)
    except ValueError as error:
        raise SpecError(f"--name: {error}.") from None
    shipped = data_dir("calibrations") / f"{_PREFIX}{name}.yaml"
    if "@" in name or looked_up("engines", name) is not None or shipped.exists():
        raise SpecError(
            f"--name {name}: is what a shipped engine is called; call your server otherwise, as in my-h100."
        )


def _places(name: str, folder: Path) -> Iterator[Path]:
    for base in (folder, Path.cwd()):
        yield base / f"{_PREFIX}{name}.yaml"
        yield base / "calibrations" / f"{_PREFIX}{name}.yaml"
    yield data_dir("calibrations") / f"{_PREFIX}{name}.yaml"


def _read(file: Path) -> OwnCalibration:
    engine = load_yaml(file).data.get("engine")
    if not isinstance(engine, str) or looked_up("engines", engine) is None:
        raise SpecError(f"{file}: its `engine` is {engine!r}, expected the name of a shipped engine, as in vllm")
    return OwnCalibration(file.resolve(), engine)
