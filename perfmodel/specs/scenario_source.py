"""Where a scenario comes from: a name, a path, its own text, or `-` for the text on stdin.

Text is what travels: to worker processes, to other machines, into a plan's export. So a scenario without a file is one
line of JSON wherever a name could stand, and everything downstream is as if a file had been given.
"""

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import find_file
from perfmodel.files.reach import is_only_names, refused
from perfmodel.files.yaml_loader import LoadedYaml, Path, Positions, load_yaml, load_yaml_text

_TEXT = "the scenario"  # how errors name one without a file
_PLACES = "said by"  # no field of a scenario
_STDIN, _LONGEST = "-", 2_000_000  # characters, as of a file


@dataclass(frozen=True, slots=True, eq=False)
class ScenarioSource:
    """Where a scenario was read. All sources are equal: scenarios are compared by what they say."""

    path: str = ""  # a name, a path or its own text; empty for a scenario made in Python
    inside: tuple[str, ...] = ()  # the keys of the block of the file that is the scenario
    overrides: tuple[str, ...] = ()  # what `--set` changed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScenarioSource)

    def __hash__(self) -> int:
        return 0


def as_text(data: dict[str, Any], places: Mapping[str, str] | None = None) -> str:
    """A scenario's mapping as text that stands where its file's name could.

    places: field -> what said it (`slo.ttft_ms` -> `--ttft 1s`), for errors to name
    """
    return json.dumps({**data, **({_PLACES: dict(places)} if places else {})}, ensure_ascii=False)


def given_source(source: str) -> str:
    """`source`; for `-` the scenario on stdin, as text that travels, each of whose fields knows its line there. Raises
    SpecError where there is none on stdin, none that is YAML, or where files are refused."""
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
    """The text on stdin. Raises SpecError for what is no UTF-8, and for more than a file may have."""
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
    """Whether `source` is a scenario's own text, and no name or path."""
    return isinstance(source, str) and source.lstrip().startswith("{")


def read_scenario(source: str | pathlib.Path, inside: Sequence[str] = ()) -> tuple[LoadedYaml, pathlib.Path]:
    """The mapping of a scenario by name, path or text, named after its file where it gives no name; and the folder that
    paths in it start from.

    inside: the keys of the block of the file that is the scenario, where the file is of something else (a study)

    Raises SpecError as `load_yaml` does.
    """
    if is_text(source):
        loaded, name, folder = load_yaml_text(str(source), _TEXT), "unnamed", pathlib.Path()
        places = loaded.data.pop(_PLACES) if isinstance(loaded.data.get(_PLACES), dict) else {}
        named: dict[Path, str] = {tuple(str(field).split(".")): str(said) for field, said in places.items()}
        loaded = LoadedYaml(loaded.data, Positions(_TEXT, named=named))  # the line of a text on one line tells nothing
    else:
        path = find_file("scenarios", source)
        loaded, name, folder = load_yaml(path).block(inside), path.stem, path.parent
    loaded.data.setdefault("name", name)
    return loaded, folder
