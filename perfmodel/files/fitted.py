"""Files of fitted numbers: what `hardware_specs/calibrations/` holds, read once and written by commands alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from perfmodel.files.base import Spec
from perfmodel.files.validation import load_spec

HEADER = "# Written by `perfmodel calibrate`, not by hand: measured or fitted factors, never declared facts.\n"
load_fitted = load_spec


def save_fitted(fits: Spec, path: Path) -> Path:
    """Write fits as YAML below the header; parents are made. Reading them back gives equal ones."""
    return write_fitted(fits.model_dump(mode="json", exclude_defaults=True), path)


def write_fitted(data: Mapping[str, Any], path: Path) -> Path:
    """Write the keys of `data` in their order, as `save_fitted` does those of fits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=100)
    path.write_text(HEADER + text, encoding="utf-8", newline="\n")
    return path
