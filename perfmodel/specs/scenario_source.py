"""Source of a scenario: a name, a path, its own text, or `-` for stdin; and the shipped ones, with their purpose.

Text travels to workers, other machines and exported plans: a scenario without a file is one line of JSON wherever a
name could stand."""

import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir, find_file
from perfmodel.files.sandbox import is_only_names, refused
from perfmodel.files.yaml_loader import LoadedYaml, Path, Positions, load_yaml, load_yaml_text

_TEXT = "the scenario"  # how errors name one without a file
_PLACES = "said by"  # no field of a scenario
_STDIN, _LONGEST = "-", 2_000_000  # characters, as of a file
_FOLDERS = ("", "planning")  # the others have scenarios of studies, techniques and publications
_COMMENT = re.compile(r"\A(?:#[^\n]*\n)+")
_SENTENCE = re.compile(r".+?[.?](?=\s|$)")


@dataclass(frozen=True, slots=True, eq=False)
class ScenarioSource:
    """Where a scenario was read. All sources are equal: scenarios compare by content."""

    path: str = ""  # a name, a path or its own text; empty for a scenario made in Python
    inside: tuple[str, ...] = ()  # the keys of the block of the file that is the scenario
    overrides: tuple[str, ...] = ()  # what `--set` changed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScenarioSource)

    def __hash__(self) -> int:
        return 0


def as_text(data: dict[str, Any], places: Mapping[str, str] | None = None) -> str:
    """A scenario as text that can stand for its file's name. places: field -> source to name in errors (`slo.ttft_ms`
    -> `--ttft 1s`)."""
    return json.dumps({**data, **({_PLACES: dict(places)} if places else {})}, ensure_ascii=False)


def given_source(source: str) -> str:
    """`source`; for `-` the text on stdin. SpecError for missing or invalid YAML, or where files are refused."""
    if source != _STDIN:
        return source
    if is_only_names():
        raise refused(source)
    text = read_stdin()
    if not text.strip():
        raise SpecError(
            "stdin: is empty; - stands for a scenario there, as in `perfmodel new LINE | perfmodel simulate -`."
        )
    if is_text(text):
        return text
    loaded = load_yaml_text(text, "stdin")
    places = {path: loaded.positions.where(tuple(path.split("."))) for path in _paths(loaded.data)}
    return as_text(loaded.data, places)


def read_stdin() -> str:
    """Text on stdin. Raises SpecError for invalid UTF-8 or beyond the file limit."""
    try:
        text = sys.stdin.read(_LONGEST + 1)
    except UnicodeDecodeError as error:
        raise SpecError(f"stdin: is not UTF-8 text (byte {error.start}).") from None
    if len(text) > _LONGEST:
        raise SpecError(f"stdin: more than {_LONGEST:,} characters; write it into a file, and give its path.")
    return text


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if "." not in key:
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.") if isinstance(value, Mapping) else ()


def is_text(source: str | pathlib.Path) -> bool:
    """Whether `source` is scenario text rather than a name or path."""
    return isinstance(source, str) and source.lstrip().startswith("{")


def read_scenario(source: str | pathlib.Path, inside: Sequence[str] = ()) -> tuple[LoadedYaml, pathlib.Path]:
    """(mapping, base folder of its paths) of a scenario by name, path or text. Raises SpecError as `load_yaml` does.

    inside: keys of the block that is the scenario, in a file of another kind (a study)"""
    if is_text(source):
        loaded, name, folder = load_yaml_text(str(source), _TEXT), "unnamed", pathlib.Path()
        places = loaded.data.pop(_PLACES) if isinstance(loaded.data.get(_PLACES), dict) else {}
        named: dict[Path, str] = {tuple(str(field).split(".")): str(place) for field, place in places.items()}
        loaded = LoadedYaml(loaded.data, Positions(_TEXT, named=named))  # the line of a text on one line tells nothing
    else:
        path = find_file("scenarios", source)
        loaded, name, folder = load_yaml(path).block(inside), path.stem, path.parent
    loaded.data.setdefault("name", name)
    return loaded, folder


def scenario_files(every: bool = False) -> list[dict[str, Any]]:
    """Name, model, hardware and purpose of each scenario, by name; with `every`, of all folders."""
    root, result = data_dir("scenarios"), []
    for path in sorted(root.rglob("*.yaml")):
        name = path.relative_to(root).with_suffix("").as_posix()
        if not every and name.rpartition("/")[0] not in _FOLDERS:
            continue
        data = load_yaml(path).data
        if "model" in data and "hardware" in data:
            row = {"name": name, "model": data["model"], "hardware": data["hardware"]}
            result.append(row | {"purpose": _purpose(path)})
    return result


def traffic_files() -> list[dict[str, Any]]:
    """Name, aliases and purpose of each traffic file, by name."""
    return [
        {"name": path.stem, "aliases": load_yaml(path).data.get("aliases", []), "purpose": _purpose(path)}
        for path in sorted(data_dir("traffic").glob("*.yaml"))
    ]


def _purpose(path: pathlib.Path) -> str:
    """First sentence of a file's leading comment."""
    comment = _COMMENT.match(path.read_text(encoding="utf-8"))
    text = " ".join(line.lstrip("# ").strip() for line in comment[0].splitlines()) if comment else ""
    sentence = _SENTENCE.match(text)
    return sentence[0] if sentence else text
