"""A state in other words: a `vllm serve` line as a state, a state as the line that starts it, and as all fields of its
scenario."""

__all__ = ["ReadLine", "read_line", "resolved_fields", "serve_line"]

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.answers.asked import RUN_FLAGS, Asked
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.web.drops import hidden, resolved, with_files, without_marks
from perfmodel.web.questions import Question, asked_of
from perfmodel.web.state import PageState


@dataclass(frozen=True, slots=True)
class ReadLine:
    """state: that a line stands for; notes: what has no part in it, or was assumed"""

    state: PageState
    notes: tuple[str, ...]


def read_line(text: str, state: PageState, folder: Path) -> ReadLine:
    """The state of a server's command line, with its load test if it has one, on the device that the page shows.

    Files that it names are not read, but for those that were dropped in `folder`. Raises SpecError as `perfmodel new`.
    """
    from perfmodel.answers.line import answer_line

    flags: dict[str, str | None] = dict.fromkeys(RUN_FLAGS)
    device = state.flags.get("hardware")
    flags["hardware"] = None if device is None else resolved(device, folder)
    with _only_dropped(folder):
        found = answer_line(text, Asked(None, flags), folder=folder)
    fields = {
        key: _text(value) for key, value in found.data.items() if key != "name" and not isinstance(value, Mapping)
    }
    for block, value in found.data.items():
        if isinstance(value, Mapping):
            fields |= {f"{block}.{key}": _text(each) for key, each in value.items()}
    return ReadLine(PageState(tuple({**fields, "hardware": device or fields["hardware"]}.items())), found.warnings)


def _text(value: Any) -> str:
    """`value` as `--set` reads it back."""
    from perfmodel.files.yaml_loader import parse_value

    if not isinstance(value, str):
        return json.dumps(value)
    try:
        return value if parse_value(value, "line") == value else json.dumps(value)
    except SpecError:
        return json.dumps(value)


def resolved_fields(state: PageState, folder: Path) -> dict[str, Any]:
    """All fields of the scenario that a state says. Raises SpecError for one that cannot be.

    folder: of dropped files
    """
    from perfmodel.cost.calibrations.provenance import resolved as fields_of

    question = with_files(Question.of("simulate", state), folder)
    with _only_dropped(folder):
        found: dict[str, Any] = fields_of(asked_of(question).load(question.sets))
    return found


def serve_line(state: PageState, folder: Path) -> list[str]:
    """Lines for a shell that start the deployment with vLLM. Raises SpecError for a scenario that cannot be."""
    from perfmodel.specs.commands.server import engine_arguments, left_out_fields

    question = with_files(Question.of("simulate", state), folder)
    with _only_dropped(folder):
        scenario = asked_of(question).load(question.sets)
    unsaid = left_out_fields(scenario.engine)
    name = without_marks(hidden(scenario.model.hf_id or scenario.model.name, folder))
    lines = [f"# no argument says: {', '.join(f'engine.{each}' for each in unsaid)}"] if unsaid else []
    return [*lines, shlex.join(["vllm", "serve", name, *engine_arguments(scenario.engine, scenario.model)])]


@contextmanager
def _only_dropped(folder: Path) -> Iterator[None]:
    """Files are those that were dropped, and errors do not say where they lie."""
    from perfmodel.files.reach import without_files

    try:
        with without_files((folder,)):
            yield
    except PerfmodelError as error:
        raise SpecError(hidden(str(error), folder)) from None
