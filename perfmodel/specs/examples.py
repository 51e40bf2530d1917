"""Shipped scenarios and traffic, with the purpose in their first comment."""

import pathlib
import re
from typing import Any

from perfmodel.files.catalog import data_dir
from perfmodel.files.yaml_loader import load_yaml

_FOLDERS = ("", "planning")  # the others have scenarios of studies, techniques and publications
_COMMENT = re.compile(r"\A(?:#[^\n]*\n)+")
_SENTENCE = re.compile(r".+?[.?](?=\s|$)")


def scenario_files(every: bool = False) -> list[dict[str, Any]]:
    """Name, model, hardware and purpose of each scenario, by name; with `every`, of all folders."""
    root, result = data_dir("scenarios"), []
    for path in sorted(root.rglob("*.yaml")):
        name = path.relative_to(root).with_suffix("").as_posix()
        if not every and name.rpartition("/")[0] not in _FOLDERS:
            continue
        data = load_yaml(path).data
        if "model" in data and "hardware" in data:
            result.append(
                {"name": name, "model": data["model"], "hardware": data["hardware"], "purpose": _purpose(path)}
            )
    return result


def traffic_files() -> list[dict[str, Any]]:
    """Name, aliases and purpose of each traffic file, by name."""
    files = sorted(data_dir("traffic").glob("*.yaml"))
    return [
        {"name": path.stem, "aliases": load_yaml(path).data.get("aliases", []), "purpose": _purpose(path)}
        for path in files
    ]


def _purpose(path: pathlib.Path) -> str:
    """First sentence of a file's leading comment."""
    comment = _COMMENT.match(path.read_text(encoding="utf-8"))
    text = " ".join(line.lstrip("# ").strip() for line in comment[0].splitlines()) if comment else ""
    sentence = _SENTENCE.match(text)
    return sentence[0] if sentence else text
