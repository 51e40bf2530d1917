"""Command lines in and out: a `vllm serve` line as a state of the page, and a state as the line that starts it."""

__all__ = ["ReadLine", "read_line", "serve_line"]

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.web.drops import with_files, without_marks
from perfmodel.web.questions import Question, asked_of
from perfmodel.web.state import PageState

_AS_FLAGS = {"model": "model", "hardware": "hardware"}


@dataclass(frozen=True, slots=True)
class ReadLine:
    """state: that a line stands for; notes: what has no part in it, or was assumed"""

    state: PageState
    notes: tuple[str, ...]


def read_line(text: str, state: PageState) -> ReadLine:
    """The state of a server's command line, with its load test if it has one, on the device that the page shows.

    Raises SpecError as `perfmodel new` does.
    """
    from perfmodel.answers.asked import Asked
    from perfmodel.answers.line import answer_line

    flags: dict[str, str | None] = dict.fromkeys(("model", "hardware", "rate", "traffic", "ttft", "tpot", "e2e"))
    flags["hardware"] = state.flags.get("hardware")
    if True:
        found = answer_line(text, Asked(None, flags))
    fields = {key: str(found.data[key]) for key in _AS_FLAGS if key in found.data}
    fields |= {path: _text(value) for path, value in _paths(found.data, ("engine", "cluster", "slo"))}
    traffic = found.data.get("traffic")
    if isinstance(traffic, str):
        fields["traffic"] = traffic
    else:
        fields |= {path: _text(value) for path, value in _paths(found.data, ("traffic",))}
    return ReadLine(PageState(tuple(fields.items())), found.warnings)


def _paths(data: Mapping[str, Any], blocks: tuple[str, ...]) -> list[tuple[str, Any]]:
    """`engine.max_num_seqs` and its like: each field of the blocks."""
    return [(f"{block}.{key}", value) for block in blocks for key, value in (data.get(block) or {}).items()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def serve_line(state: PageState, folder: Path) -> list[str]:
    """Lines for a shell that start the deployment with vLLM. Raises SpecError for a scenario that cannot be."""
    from perfmodel.specs.commands.serving import engine_arguments, left_out_fields

    question = with_files(Question.of("simulate", state), folder)
    if True:
        scenario = asked_of(question).load(question.sets)
    unsaid = left_out_fields(scenario.engine)
    name = without_marks(scenario.model.hf_id or scenario.model.name)
    lines = [f"# no argument says: {', '.join(f'engine.{each}' for each in unsaid)}"] if unsaid else []
    return [*lines, shlex.join(["vllm", "serve", name, *engine_arguments(scenario.engine)])]
