"""`Desk`: where questions are brought: closed forms are answered at once, others by a worker; files that were dropped
take the place of what stands for them, and their paths leave with no answer."""

__all__ = ["Desk", "Finding"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.web.drops import Drops, hidden, with_files
from perfmodel.web.jobs import BackgroundJob, JobQueue, Lane
from perfmodel.web.known import Known
from perfmodel.web.questions import Progress, Question, Shown, ask

_WARM_UP = Question(
    "simulate", flags=(("model", "llama-3.1-8b"), ("hardware", "h100-sxm-80gb")), sets=("traffic.num_requests=8",)
)


@dataclass(frozen=True)
class Finding:
    """What there is of a question: its answer, or why there is none, or how far the work on it is."""

    question: Question
    shown: Shown | None = None
    refusal: str = ""
    job: BackgroundJob | None = None


class Desk:
    """Answers questions, and remembers."""

    def __init__(self) -> None:
        self.drops = Drops()
        work = partial(_answer, self.drops.folder)
        self._known = Known(partial(work, progress=None))
        self._jobs = JobQueue(self._known, work)

    async def start(self) -> None:
        """Start the workers; the quick one learns what all questions ask before somebody waits for it."""
        await self._jobs.start()
        self._jobs.begin(_WARM_UP, "quick")

    async def close(self) -> None:
        """End the workers, and take dropped files away."""
        await self._jobs.close()
        self.drops.close()

    def take(self, name: str, content: bytes, full_size: int | None = None) -> str:
        """Keep a file that was dropped; see `Drops.take`."""
        mark = self.drops.take(name, content, full_size)
        self._known.forget_refusals()  # of questions that missed it
        return mark

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
        job = None if shown else self._jobs.last(question)
        # What was answered once and is not known any more is asked anew.
        return Finding(question, shown, job=None if job and job.state in ("done", "refused") else job)

    def forget_refusals(self) -> None:
        """Ask again what was refused, as when a page is loaded again: there may be what was missing."""
        self._known.forget_refusals()

    def begin(self, questions: Sequence[Question], lane: Lane, reader: str = "") -> list[BackgroundJob]:
        """Let a worker answer what is not known of some questions. Raises SpecError where too many wait.

        reader: the part of a page that asks; what it asked before is stopped, unless somebody else waits for it
        """
        if reader:
            self._jobs.leave(reader, questions)
        return [self._jobs.begin(question, lane, reader) for question in questions if not self._is_settled(question)]

    def join(self, questions: Sequence[Question], reader: str) -> None:
        """`reader` waits for what is under way of some questions, too, as a page does that was loaded again."""
        for question in questions if reader else ():
            job = self._jobs.last(question)
            if job is not None and not job.is_over:
                self._jobs.join(job, reader)

    def see(self, page: str) -> None:
        """A page is open; see `JobQueue.see`."""
        self._jobs.see(page)

    def depart(self, page: str) -> None:
        """A page closes; see `JobQueue.depart`."""
        self._jobs.depart(page)

    def _is_settled(self, question: Question) -> bool:
        finding = self.look(question)
        return finding.shown is not None or bool(finding.refusal)

    def stop(self, question: Question) -> None:
        """Stop the work on a question."""
        job = self._jobs.last(question)
        if job is not None and not job.is_over:
            self._jobs.stop(job)


def _answer(folder: Path, question: Question, progress: Progress | None) -> Shown:
    """The answer, in this process; nothing in it tells where dropped files are."""
    found = with_files(question, folder)
    try:
        shown = ask(found, progress, (folder,))
    except PerfmodelError as error:
        raise SpecError(hidden(str(error), folder)) from None
    if found == question:
        return shown
    plain = (shown.data, shown.document, shown.files)
    return Shown(question, *(_all_hidden(each, folder) for each in plain))


def _all_hidden(value: Any, folder: Path) -> Any:
    """`hidden` of each text in plain data."""
    if isinstance(value, str):
        return hidden(value, folder)
    if isinstance(value, Mapping):
        return {_all_hidden(key, folder): _all_hidden(each, folder) for key, each in value.items()}
    return [_all_hidden(each, folder) for each in value] if isinstance(value, list | tuple) else value
