"""What a command answers: the data of its `--json`, and a document that any renderer shows."""

__all__ = ["Answer", "Progress", "Watch", "unwatched"]

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.report.document import Document

Progress = Callable[[int, int | None], None]  # called with (done, of how many)
Watch = Callable[[str], AbstractContextManager[Progress | None]]  # a stage's name -> what shows how far it is


@dataclass(frozen=True)
class Answer:
    """Both are made when they are first asked for: who wants JSON loads no renderer, who wants a table no provenance.

    make_data:     of what `--json` prints
    make_document: of what is shown
    result:        what both are made of, where there is more to do with it; None of a list
    make_brief:    of what a terminal shows unless details are asked for; None: the whole document
    """

    make_data: Callable[[], Any]
    make_document: "Callable[[], Document]"
    result: Any = None
    make_brief: "Callable[[], Document] | None" = None

    @cached_property
    def data(self) -> Any:
        """What `--json` prints, once `to_jsonable` has replaced what JSON has no word for."""
        return self.make_data()

    @cached_property
    def document(self) -> "Document":
        """What the terminal, a report and a page show."""
        return self.make_document()


def unwatched(what: str) -> AbstractContextManager[Progress | None]:
    """The progress of `what`, which nobody looks at."""
    return nullcontext(None)
