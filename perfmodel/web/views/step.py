"""Where the time of one step goes: a decode of a batch, and a prefill of one prompt."""

__all__ = ["STEP"]

from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.view import View, ViewPart


def _decode(state: PageState) -> tuple[Question, ...]:
    return (Question.of("explain", state, batch=state.get("batch"), context=state.get("context")),)


def _prefill(state: PageState) -> tuple[Question, ...]:
    return (Question.of("explain", state, prefill=state.get("prefill", "2048")),)


STEP = View(
    "step",
    "Step",
    "Where does the time of a step go?",
    (ViewPart("decode", _decode), ViewPart("prefill", _prefill)),
    has_controls=True,
)
