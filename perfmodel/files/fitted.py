"""Fitted numbers: files of `hardware_specs/calibrations/`, cached, written only by commands."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from perfmodel.files.base import Spec
from perfmodel.files.validation import load_spec

HEADER = "# Written by `perfmodel calibrate`, not by hand: measured or fitted factors, never declared facts.\n"
load_fitted = load_spec


class CommittedFits(Spec):
    """A file of `hardware_specs/calibrations/` that holds for all devices: where its numbers come from."""

    source: str = ""
    date: datetime.date | None = None
    command: str = ""


def save_fitted(fits: Spec, path: Path) -> Path:
    """Write `fits` as YAML below the header, with parent folders. Round trips are exact."""
    return write_fitted(fits.model_dump(mode="json", exclude_defaults=True), path)


def write_fitted(data: Mapping[str, Any], path: Path) -> Path:
    """Write `data` in key order, as `save_fitted` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=100)
    path.write_text(HEADER + text, encoding="utf-8", newline="\n")
    return path
