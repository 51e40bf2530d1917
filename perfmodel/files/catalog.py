"""Catalogue of data files by name; reads nothing in them but `aliases`.

A wheel has the data in `perfmodel/_data/`, a checkout beside the package. Aliases are for names that no file has."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.sandbox import PACKAGE, is_allowed, is_only_names, refuse_path, refused

_Hardware = Literal["hardware", "families", "architectures", "engines", "commands", "networks", "prices"]
_Workloads = Literal["models", "tables", "traffic", "scenarios", "studies", "techniques"]
Kind = Literal[_Hardware, _Workloads, "calibrations", "validated", "reports", "dashboards"]

# The folder of each, and what one of its files is called in errors.
_KINDS: dict[Kind, tuple[str, str]] = {
    "models": ("workloads/models", "model"),
    "tables": ("workloads/tables", "table"),
    "hardware": ("hardware_specs", "hardware"),
    "families": ("hardware_specs/families", "family of devices"),
    "architectures": ("hardware_specs/architectures", "architecture"),
    "engines": ("hardware_specs/engines", "engine"),
    "commands": ("hardware_specs/engines/commands", "command"),
    "networks": ("hardware_specs/networks", "network"),
    "prices": ("hardware_specs/prices", "list of prices"),
    "traffic": ("workloads/traffic", "traffic"),
    "scenarios": ("workloads/scenarios", "scenario"),
    "studies": ("workloads/scenarios/studies", "study"),
    "calibrations": ("hardware_specs/calibrations", "calibration"),
    "validated": ("hardware_specs/validated", "index of validations"),
    "techniques": ("workloads/techniques", "family of techniques"),
    "reports": ("reports", "report"),
    "dashboards": ("deploy/grafana/dashboards", "dashboard"),
}
_YAML = (".yaml", ".yml")
# `aliases: [a, "b"]` on one or several lines, or a block list, at the top level of a file.
_ALIASES = re.compile(r"^aliases:[ \t]*(?:\[(?P<flow>[^\]]*)\]|\n(?P<block>(?:[ \t]*-[^\n]*\n?)+))", re.MULTILINE)


def data_dir(kind: Kind) -> Path:
    """Folder with the files of `kind`: the wheel's, else the checkout's."""
    installed = PACKAGE / "_data" / _KINDS[kind][0]
    return installed if installed.is_dir() else PACKAGE.parent / _KINDS[kind][0]


def list_names(kind: Kind, suffixes: Sequence[str] = _YAML) -> list[str]:
    """Sorted names of files of `kind`, unopened."""
    return sorted(path.name.removesuffix(path.suffix) for path in _files(kind, suffixes))


def find_file(kind: Kind, name_or_path: str | Path, suffixes: Sequence[str] = _YAML) -> Path:
    """File by name, alias or path. Raises SpecError with the nearest names.

    A `Path`, or text with a folder or one of `suffixes`, is a path if it exists. Names compare by `normal_name`."""
    file = looked_up(kind, name_or_path, suffixes)
    if file is None:
        raise unknown_name(kind, str(name_or_path), suffixes)
    return file


def expanded(path: str | Path) -> Path:
    """`path` with `~` or `~user` expanded; unchanged for unknown users or where files are refused."""
    if is_only_names():
        return Path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def looked_up(kind: Kind, name_or_path: str | Path, suffixes: Sequence[str] = _YAML) -> Path | None:
    """As `find_file`, or None. Raises SpecError for what can only be a path and is missing or forbidden."""
    text = str(name_or_path)
    path = expanded(text)
    is_path = isinstance(name_or_path, Path) or "/" in text or "\\" in text or path.suffix in suffixes
    if is_path and is_allowed(path) and path.exists():
        return path
    # A file called exactly so, perhaps with a folder in front (`executor/mixed`), costs one or two stat calls.
    if text and "\\" not in text and not text.startswith(("/", "~", ".")) and ".." not in text.split("/"):
        for candidate in (data_dir(kind) / f"{text}{suffix}" for suffix in ("", *suffixes)):
            if candidate.suffix in suffixes and candidate.is_file():
                return candidate
    wanted = normal_name(text)
    for file in _files(kind, suffixes):
        if normal_name(file.name.removesuffix(file.suffix)) == wanted:
            return file
    aliases = aliases_of(kind, tuple(suffixes))
    if wanted in aliases:
        return aliases[wanted]
    if is_path and not ("/" in text and not text.startswith((".", "/", "~")) and path.suffix not in suffixes):
        raise SpecError(f"{text}: no such file.") if is_allowed(path) else refused(text)
    if is_path:
        refuse_path(name_or_path)
    return None


def _files(kind: Kind, suffixes: Sequence[str]) -> Iterator[Path]:
    folder = data_dir(kind)
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.suffix in suffixes and path.is_file())


@cache
def aliases_of(kind: Kind, suffixes: tuple[str, ...] = _YAML) -> dict[str, Path]:
    """Normalised alias -> file; a repository alias (`org/name`) also without its owner.

    Read by regular expression: a few milliseconds for a hundred files."""
    file_of: dict[str, Path] = {}
    for path in _files(kind, suffixes):
        match = _ALIASES.search(path.read_text(encoding="utf-8", errors="replace"))
        if match is None:
            continue
        items = re.split(r",|\n\s*-|^\s*-", match["flow"] if match["flow"] is not None else match["block"])
        for item in items:
            alias = item.split(" #")[0].strip().strip("\"'")
            if alias:
                file_of.setdefault(normal_name(alias), path)
    for alias, path in [*file_of.items()]:
        file_of.setdefault(alias.rpartition("/")[2], path)
    return file_of


def normal_name(name: str) -> str:
    """Lower case, with hyphens for spaces and underscores."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def unknown_name(kind: Kind, text: str, suffixes: Sequence[str] = _YAML, more_names: Sequence[str] = ()) -> SpecError:
    """Error for the unknown name `text`, with the nearest names of `kind` (by `suffixes`) and of `more_names`."""
    names, wanted = sorted([*list_names(kind, suffixes), *more_names]), normal_name(text)
    longer = [name for name in names if wanted and name.startswith(wanted)][:3]
    known = longer or dict.fromkeys([*names, *(name for name in aliases_of(kind, tuple(suffixes)) if "/" not in name)])
    near = did_you_mean(longer[0] if longer else wanted, known)
    if not near and names:
        shown = ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")
        near = f" Known: {shown}."
    where = f"no file of this name in {_KINDS[kind][0]}{'' if is_only_names() else ', and no such path'}"
    return SpecError(f"unknown {_KINDS[kind][1]} {text!r}: {where}.{near}")
