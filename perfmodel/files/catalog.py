"""Where the data files are and what they are called; knows nothing of what is inside them but their `aliases`.

An installed wheel carries the data in `perfmodel/_data/`; a checkout has it beside the package. A name
is looked up without reading any file; only a name that is no file's own is compared with the aliases.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.reach import PACKAGE, is_only_names, may_touch, refuse_path, refused

_Hardware = Literal["hardware", "families", "architectures", "engines", "commands", "networks", "prices"]
_Workloads = Literal["models", "traffic", "scenarios", "studies", "techniques"]
Kind = Literal[_Hardware, _Workloads, "calibrations", "validated", "reports"]

# The folder of each, and what one of its files is called in errors.
_KINDS: dict[Kind, tuple[str, str]] = {
    "models": ("workloads/models", "model"),
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
}
_YAML = (".yaml", ".yml")
# `aliases: [a, "b"]` on one or several lines, or a block list, at the top level of a file.
_ALIASES = re.compile(r"^aliases:[ \t]*(?:\[(?P<flow>[^\]]*)\]|\n(?P<block>(?:[ \t]*-[^\n]*\n?)+))", re.MULTILINE)


def data_dir(kind: Kind) -> Path:
    """The folder that holds the files of `kind`: the wheel's if it is there, else the checkout's."""
    installed = PACKAGE / "_data" / _KINDS[kind][0]
    return installed if installed.is_dir() else PACKAGE.parent / _KINDS[kind][0]


def list_names(kind: Kind, suffixes: Sequence[str] = _YAML) -> list[str]:
    """The names of all files of `kind`, sorted; no file is opened."""
    return sorted(path.name.removesuffix(path.suffix) for path in _files(kind, suffixes))


def find_file(kind: Kind, name_or_path: str | Path, suffixes: Sequence[str] = _YAML) -> Path:
    """The file meant by a name, an alias or a path.

    A `Path`, or a string with a folder or one of `suffixes` in it, is a path if something is there. Names and aliases
    are compared as `normal_name` writes them.

    Raises SpecError that names the nearest known names.
    """
    found = looked_up(kind, name_or_path, suffixes)
    if found is None:
        raise unknown_name(kind, str(name_or_path), suffixes)
    return found


def expanded(path: str | Path) -> Path:
    """`path` with the folder of a user in place of `~` or `~user`; as it is where there is no such user, or
    where files are refused."""
    if is_only_names():
        return Path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def looked_up(kind: Kind, name_or_path: str | Path, suffixes: Sequence[str] = _YAML) -> Path | None:
    """As `find_file`; None where no file is meant. Raises SpecError for what can only be a path, and is not there, or
    may not be touched."""
    text = str(name_or_path)
    path = expanded(text)
    is_path = isinstance(name_or_path, Path) or "/" in text or "\\" in text or path.suffix in suffixes
    if is_path and may_touch(path) and path.exists():
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
        raise SpecError(f"{text}: no such file.") if may_touch(path) else refused(text)
    if is_path:
        refuse_path(name_or_path)
    return None


def _files(kind: Kind, suffixes: Sequence[str]) -> Iterator[Path]:
    folder = data_dir(kind)
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.suffix in suffixes and path.is_file())


@cache
def aliases_of(kind: Kind, suffixes: tuple[str, ...] = _YAML) -> dict[str, Path]:
    """Alias (its `normal_name`) -> file, that of a repository (`org/name`) without its owner as well.

    Read with a regular expression: a hundred files take a few milliseconds.
    """
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
    """As names are compared: without regard to case, with spaces and underscores as hyphens."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def unknown_name(kind: Kind, text: str, suffixes: Sequence[str] = _YAML, more_names: Sequence[str] = ()) -> SpecError:
    """What is said of a name that nothing is called: the nearest ones that are known.

    kind, suffixes: of the files that it was looked for among
    text:           the name as it was given
    more_names:     what is known beside the files' names and aliases
    """
    names, wanted = sorted([*list_names(kind, suffixes), *more_names]), normal_name(text)
    longer = [name for name in names if wanted and name.startswith(wanted)][:3]
    known = longer or dict.fromkeys(
        [*names, *(alias for alias in aliases_of(kind, tuple(suffixes)) if "/" not in alias)]
    )
    near = did_you_mean(longer[0] if longer else wanted, known)
    if not near and names:
        shown = ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")
        near = f" Known: {shown}."
    where = f"no file of this name in {_KINDS[kind][0]}{'' if is_only_names() else ', and no such path'}"
    return SpecError(f"unknown {_KINDS[kind][1]} {text!r}: {where}.{near}")
