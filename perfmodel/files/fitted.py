"""Files of fitted numbers: what `hardware_specs/calibrations/` holds, read once and written by commands alone."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from perfmodel.files.base import Spec
from perfmodel.files.reach import refuse_path
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml

HEADER = "# Written by `perfmodel calibrate`, not by hand: measured or fitted factors, never declared facts.\n"

Fits = TypeVar("Fits", bound=Spec)


def load_fitted(kind: type[Fits], file: Path) -> Fits:
    """What a file holds, as it was last written. Raises SpecError for one that is missing or malformed."""
    refuse_path(file)
    written_at = file.stat().st_mtime_ns if file.is_file() else 0  # of one that is missing, reading says so
    return cast(Fits, _parsed(kind, file, written_at))


@lru_cache(maxsize=128)
def _parsed(kind: type[Spec], file: Path, _written_at: int) -> Spec:
    """Parsing a calibration takes longer than many a simulation that uses it."""
    loaded = load_yaml(file)
    return parse(kind, loaded.data, loaded.positions)


def save_fitted(fits: Spec, path: Path) -> Path:
    """Write fits as YAML below the header; parents are made. Reading them back gives equal ones."""
    return write_fitted(fits.model_dump(mode="json", exclude_defaults=True), path)


def write_fitted(data: Mapping[str, Any], path: Path) -> Path:
    """Write the keys of `data` in their order, as `save_fitted` does those of fits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=100)
    path.write_text(HEADER + text, encoding="utf-8", newline="\n")
    return path
