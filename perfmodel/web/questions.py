"""`Question`: what a view wants to know, as a command that answers it; and the answer, as a page can show it.

A page has no figures of its own: each is one of the JSON that the question's command line prints.
"""

__all__ = ["Progress", "Question", "Shown", "ask", "asked_of"]

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfmodel.answers.asked import FLAG_FIELDS, MEMORY_FLAGS, RUN_FLAGS, STEP_FLAGS, Asked
from perfmodel.web.state import PageState

Progress = Callable[[str], AbstractContextManager[Callable[[int, int | None], None] | None]]  # as `answers` take it

_FLAGS: Mapping[str, tuple[str, ...]] = {
    "memory": MEMORY_FLAGS,
    "explain": STEP_FLAGS,
    **dict.fromkeys(("simulate", "whatif", "plan"), RUN_FLAGS),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One command line.

    command:  memory, explain, simulate, whatif, plan, techniques, hardware
    scenario: a name of the catalog, or none
    flags:    (flag, value) that stand for a scenario, or for what else the command asks; "": it takes none
    sets:     the values of `--set`
    """

    command: str
    scenario: str = ""
    flags: tuple[tuple[str, str], ...] = ()
    sets: tuple[str, ...] = ()

    @classmethod
    def of(cls, command: str, state: PageState, *sets: str, **options: Any) -> "Question":
        """What `command` says of a state.

        sets:    further values of `--set`
        options: further flags; a tuple is a flag that comes several times; None and "" are left out
        """
        scenario = state.get("scenario")
        given = {key: value for key, value in state.flags.items() if key in _FLAGS[command]}
        named: tuple[str, ...] = ()
        if scenario:
            named, given = tuple(f"{FLAG_FIELDS[key]}={value}" for key, value in given.items()), {}
        flags = [*given.items(), *_flat(options)]
        return cls(command, scenario, tuple(flags), (*named, *state.overrides, *sets))

    @property
    def arguments(self) -> list[str]:
        """What follows `perfmodel` on the command line."""
        words = [*self.command.split(), *([self.scenario] if self.scenario else [])]
        for name, value in self.flags:
            words += [f"--{name}", value] if value else [f"--{name}"]
        for text in self.sets:
            words += ["--set", text]
        return words

    @property
    def line(self) -> str:
        """The command that gives the same answer."""
        return shlex.join(["perfmodel", *self.arguments])

    def options(self, name: str) -> list[str]:
        """All values of a flag."""
        return [value for flag, value in self.flags if flag == name]

    def option(self, name: str) -> str | None:
        """The value of a flag that comes once, if it is there."""
        return next(iter(self.options(name)), None)


def _flat(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    flat = []
    for name, value in options.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each not in (None, "", False):
                flat.append((name, "" if each is True else str(each)))
    return flat


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer as a page shows it: plain data, which passes between processes.

    question: that was answered
    data:     what its command prints with `--json`
    document: its blocks (`perfmodel.report.document.document_json`)
    files:    name -> text, of what the answer can be taken along as
    """

    question: Question
    data: Any
    document: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)

    def blocks(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The blocks of some kinds, or all; those of details in their place."""
        flat: list[Mapping[str, Any]] = []
        for block in self.document["blocks"]:
            flat += block["blocks"] if block["kind"] == "details" else [block]
        return [block for block in flat if not kinds or block["kind"] in kinds]


def ask(question: Question, progress: Progress | None = None, allowed: Sequence[Path] = ()) -> Shown:
    """The answer to a question. Raises PerfmodelError as its command refuses it, and for names of files elsewhere.

    progress: as commands draw theirs: what is done -> a context that gives a callback (done, total)
    allowed:  folders whose files may be named
    """
    from perfmodel.files.reach import without_files
    from perfmodel.printable import to_jsonable
    from perfmodel.report.document import document_json
    from perfmodel.web.exports import files_of

    with without_files(allowed):
        answer = _ANSWERS[question.command](question, progress or (lambda what: nullcontext()))
        files = files_of(question.command, answer)
        return Shown(question, to_jsonable(answer.data), document_json(answer.document), files)


def asked_of(question: Question) -> Asked:
    """The scenario that a question is asked of, as commands take it."""
    flags = {name: question.option(name) for name in _FLAGS[question.command]}
    return Asked(question.scenario or None, flags)


def _memory(question: Question, progress: Progress) -> Any:
    from perfmodel.answers.memory import answer_memory

    return answer_memory(asked_of(question), question.sets)


def _explain(question: Question, progress: Progress) -> Any:
    from perfmodel.answers.step import answer_step

    return answer_step(asked_of(question), question.sets, **_step(question))


def _step(question: Question) -> dict[str, int]:
    from perfmodel.errors import SpecError
    from perfmodel.files.units import parse_count

    found = {}
    for name in ("batch", "context", "prefill"):
        text = question.option(name)
        if text is None:
            continue
        try:
            found[name] = int(parse_count(text))
        except ValueError:
            found[name] = 0
        if found[name] < 1:
            raise SpecError(f"{name}: found {text!r}, allowed a whole number of at least 1, as in 64 or 8K.")
    return found


def _simulate(question: Question, progress: Progress) -> Any:
    from perfmodel.answers.run import answer_run

    with progress("simulating") as callback:
        return answer_run(asked_of(question), question.sets, progress=callback)


def _whatif(question: Question, progress: Progress) -> Any:
    from perfmodel.answers.whatif import answer_whatif

    return answer_whatif(
        asked_of(question),
        question.options("vary"),
        question.options("metric"),
        question.option("grid") is not None,
        question.option("against"),
        question.sets,
        workers=1,
        progress=progress,
        command=question.line,
        intervals=question.option("intervals") is not None,
    )


def _plan(question: Question, progress: Progress) -> Any:
    from perfmodel.answers.plan import answer_plan

    return answer_plan(asked_of(question), question.sets, workers=1, progress=progress, command=question.line)


def _techniques(question: Question, progress: Progress) -> Any:
    from perfmodel.answers.techniques import answer_techniques

    return answer_techniques(question.option("family"))


def _hardware(question: Question, progress: Progress) -> Any:
    from perfmodel.answers.hardware import answer_device

    return answer_device(question.scenario)


_ANSWERS: Mapping[str, Callable[[Question, Progress], Any]] = {
    "memory": _memory,
    "explain": _explain,
    "simulate": _simulate,
    "whatif": _whatif,
    "plan": _plan,
    "techniques": _techniques,
    "hardware show": _hardware,
}
