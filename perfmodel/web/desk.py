"""`Desk`: where questions are brought: closed forms are answered at once, others by a worker; files that were dropped
take the place of what stands for them, and their paths leave with no answer."""

__all__ = ["Desk", "Finding"]

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.web.drops import Drops, with_files
from perfmodel.web.errands import Errand, Errands, Lane
from perfmodel.web.known import Known
from perfmodel.web.questions import Progress, Question, Shown, ask


@dataclass(frozen=True)
class Finding:
    """What there is of a question: its answer, or why there is none, or how far the work on it is."""

    question: Question
    shown: Shown | None = None
    refusal: str = ""
    errand: Errand | None = None


class Desk:
    """Answers questions, and remembers."""

    def __init__(self) -> None:
        self.drops = Drops()
        work = partial(_answer, self.drops.folder)
        self._known = Known(partial(work, progress=None))
        self._errands = Errands(self._known, work)

    async def start(self) -> None:
        """Start the workers."""
        await self._errands.start()

    async def close(self) -> None:
        """End the workers, and take dropped files away."""
        await self._errands.close()
        self.drops.close()

    def answer(self, question: Question) -> Finding:
        """The answer to a closed form, at once; called in a thread."""
        try:
            return Finding(question, self._known.answer(question))
        except PerfmodelError as error:
            return Finding(question, refusal=str(error))

    def look(self, question: Question) -> Finding:
        """What there is of a question, without any work on it."""
        try:
            shown = self._known.find(question)
        except PerfmodelError as error:
            return Finding(question, refusal=str(error))
        return Finding(question, shown, errand=None if shown else self._errands.last(question))

    def begin(self, question: Question, lane: Lane) -> Errand | None:
        """Let a worker answer a question; None where its answer is known. Raises SpecError where too many wait."""
        try:
            return None if self._known.find(question) else self._errands.begin(question, lane)
        except SpecError:
            if self._errands.last(question) is None:
                raise
            return None  # refused: `look` says why

    def stop(self, question: Question) -> None:
        """Stop the work on a question."""
        errand = self._errands.last(question)
        if errand is not None and not errand.is_over:
            self._errands.stop(errand)


def _answer(folder: Path, question: Question, progress: Progress | None) -> Shown:
    """The answer, in this process; nothing in it tells where dropped files are."""
    found = with_files(question, folder)
    try:
        shown = ask(found, progress, (folder,))
    except PerfmodelError as error:
        raise SpecError(_hidden(str(error), folder)) from None
    if found == question:
        return shown
    data, document = json.loads(_hidden(json.dumps([shown.data, shown.document]), folder))
    return Shown(question, data, document)


def _hidden(text: str, folder: Path) -> str:
    """`text` with names of dropped files in place of their paths."""
    return re.sub(re.escape(f"{folder}/") + r"[0-9a-f]{16}/", "", text).replace(str(folder), "")
