"""Where the time of one step goes: a decode of a batch, and a prefill of one prompt."""

__all__ = ["STEP"]

from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.view import View, ViewPart

_PLOTS = ("plot",)


def _decode(state: PageState) -> tuple[Question, ...]:
    return (Question.of("explain", state, batch=state.get("batch"), context=state.get("context")),)


def _prefill(state: PageState) -> tuple[Question, ...]:
    return (Question.of("explain", state, prefill=state.get("prefill", "2048")),)


def _curve(state: PageState) -> tuple[Question, ...]:
    """How a step grows with the batch and with the context, from the values that are given, or the typical step."""
    batch, context = state.get("batch"), state.get("context")
    given = (f"step.batch={batch or 32}", f"step.context={context or 1024}") if batch or context else ()
    vary = ("step.batch=1..1024:11", "step.context=256..131072:10")
    return (Question.of("whatif", state, *given, vary=vary, metric="step_ms"),)


STEP = View(
    "step",
    "Step",
    "Where does the time of a step go?",
    (
        ViewPart("decode", _decode, is_kept=True, drawn=_PLOTS),
        ViewPart("curve", _curve, "quick", help="how a step grows with batch and context"),
        ViewPart("prefill", _prefill, is_kept=True, drawn=_PLOTS),
    ),
    has_controls=True,
)
