"""`Known`: answers by their question, so that views share them and nothing is worked out again that did not change."""

__all__ = ["Known"]

import pickle
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.web.questions import Question, Shown

_MOST = 400
_MOST_BYTES = 50_000_000  # as pickled, which is some fifth of what they take


class _Kept(NamedTuple):
    answer: Shown | str  # a refusal by its sentence: an error holds on to the frames that it came through
    size: int


class Known:
    """The answers last asked for, refusals too; safe for threads, one of which works out a closed form at a time.

    most_bytes: of all of them together; the last answer is kept however large it is
    """

    def __init__(self, work_out: Callable[[Question], Shown], most_bytes: int = _MOST_BYTES) -> None:
        self._work_out, self._most_bytes = work_out, most_bytes
        self._found: OrderedDict[Question, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._lock, self._work_lock = Lock(), Lock()

    def find(self, question: Question) -> Shown | None:
        """The answer, if it is known. Raises PerfmodelError where the question was refused."""
        with self._lock:
            found = self._found.get(question)
            if found is None:
                return None
            self._found.move_to_end(question)
        if isinstance(found.answer, str):
            raise SpecError(found.answer)
        return found.answer

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
        plain = answer if isinstance(answer, Shown) else str(answer)
        kept = _Kept(plain, len(pickle.dumps(plain)))
        with self._lock:
            self._drop(question)
            self._found[question] = kept
            self._num_bytes += kept.size
            while len(self._found) > 1 and (len(self._found) > _MOST or self._num_bytes > self._most_bytes):
                self._drop(next(iter(self._found)))

    def _drop(self, question: Question) -> None:
        found = self._found.pop(question, None)
        self._num_bytes -= found.size if found is not None else 0

    def forget_refusals(self) -> None:
        """Forget what was refused: a file may be here again, or there may be more memory."""
        with self._lock:
            for question in [each for each, kept in self._found.items() if isinstance(kept.answer, str)]:
                self._drop(question)
