"""Calibration files: found by device and engine profile, read with readable errors, written with their origin."""

__all__ = ["load_calibration", "save_calibration"]

from pathlib import Path

import yaml

from perfmodel.cost.calibration import Calibration
from perfmodel.cost.datasheet import datasheet
from perfmodel.specs.catalog import data_dir
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.validation import parse
from perfmodel.specs.yaml_loader import load_yaml

_HEADER = "# Written by `perfmodel calibrate`, not by hand: measured or fitted factors, never declared facts.\n"


def load_calibration(
    hardware: HardwareSpec, engine_profile: str = "vllm", path: str | Path | None = None
) -> Calibration:
    """The calibration for a device under an engine.

    `path` if given, else `<device>@<profile>.yaml` among the calibrations, else the datasheet's (also for the profile
    "datasheet"); `origin` says which.

    Raises SpecError for a file that is missing (only when `path` is given) or malformed.
    """
    file = Path(path) if path is not None else data_dir("calibrations") / f"{hardware.name}@{engine_profile}.yaml"
    if path is None and (engine_profile == "datasheet" or not file.is_file()):
        return datasheet(hardware)
    loaded = load_yaml(file)
    return parse(Calibration, loaded.data, loaded.positions)


def save_calibration(calibration: Calibration, path: str | Path) -> Path:
    """Write a calibration as YAML; parents are made. Reading it back gives an equal calibration."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = calibration.model_dump(mode="json", exclude_defaults=True)
    data = {"device": calibration.device, "engine": calibration.engine, "origin": calibration.origin} | data
    text = _HEADER + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    file.write_text(text, encoding="utf-8")
    return file
