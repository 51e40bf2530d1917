"""`Known`: answers by their question, so that views share them and nothing is worked out again that did not change."""

__all__ = ["Known"]

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from perfmodel.errors import PerfmodelError
from perfmodel.web.questions import Question, Shown

_MOST = 400  # answers of some 50 kB


class Known:
    """The answers last asked for, refusals too; safe for threads, one of which works out a closed form at a time."""

    def __init__(self, work_out: Callable[[Question], Shown]) -> None:
        self._work_out = work_out
        self._found: OrderedDict[Question, Shown | PerfmodelError] = OrderedDict()
        self._lock, self._work_lock = Lock(), Lock()

    def find(self, question: Question) -> Shown | None:
        """The answer, if it is known. Raises PerfmodelError where the question was refused."""
        with self._lock:
            found = self._found.get(question)
            if found is not None:
                self._found.move_to_end(question)
        if isinstance(found, PerfmodelError):
            raise found.with_traceback(None)
        return found

    def answer(self, question: Question) -> Shown:
        """The answer, worked out here if need be: for closed forms. Raises PerfmodelError as the command does."""
        with self._work_lock:
            found = self.find(question)
            if found is None:
                try:
                    found = self._work_out(question)
                except PerfmodelError as error:
                    self.keep(question, error)
                    raise
                self.keep(question, found)
        return found

    def keep(self, question: Question, answer: Shown | PerfmodelError) -> None:
        """Remember what came of a question elsewhere."""
        with self._lock:
            self._found[question] = answer
            self._found.move_to_end(question)
            while len(self._found) > _MOST:
                self._found.popitem(last=False)

    def forget(self) -> None:
        """Forget all, as when a file on which answers rest was dropped again."""
        with self._lock:
            self._found.clear()
