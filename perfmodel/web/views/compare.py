"""Deployments side by side: the one of the form, and up to three others, which the address has as states of their own.

All get the traffic and the limits of the first, unless they say others.
"""

__all__ = ["COMPARE", "columns_of", "deployment_of", "main_of"]

from perfmodel.answers.asked import LIMITS
from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.bounded import whole_run
from perfmodel.web.views.traffic import largest_rate
from perfmodel.web.views.view import View, ViewPart

_BATCH, _CONTEXT = "32", "2048"  # of the step that all are asked for
_SHARED = ("rate", "traffic", *LIMITS, "seed")
_OF_TRAFFIC = ("traffic.", "slo.")


def columns_of(state: PageState) -> tuple[PageState, ...]:
    """The deployments as they are asked for, the form's own first."""
    first = state.alone()
    shared = {key: value for key, value in first.fields if _is_shared(key)}
    others = (
        PageState((*other.fields, *((k, v) for k, v in shared.items() if not other.get(k)))) for other in state.others
    )
    return (first, *others)


def deployment_of(state: PageState) -> PageState:
    """What a state says of the deployment alone: how it stands beside another one, whose traffic it gets."""
    shown = {**state.flags, **dict(state.alone().fields)}
    return PageState(tuple((key, value) for key, value in shown.items() if not _is_shared(key)))


def main_of(state: PageState, number: int) -> PageState:
    """The state in which the column of a number, from 1, changes places with the first one."""
    columns, others = columns_of(state), list(state.others)
    others[number - 1] = deployment_of(state)
    return PageState(columns[number].fields, tuple(others))


def _is_shared(key: str) -> bool:
    return key in _SHARED or key.startswith(_OF_TRAFFIC)


def _deployments(state: PageState) -> tuple[Question, ...]:
    """Memory of each, and one step that is the same for all."""
    batch, context = state.get("batch", _BATCH), state.get("context", _CONTEXT)
    return tuple(
        question
        for column in columns_of(state)
        for question in (Question.of("memory", column), Question.of("explain", column, batch=batch, context=context))
    )


def _served(state: PageState) -> tuple[Question, ...]:
    """What each does under the traffic as it is, and how much more that could be."""
    return tuple(question for column in columns_of(state) for question in (whole_run(column), largest_rate(column)))


COMPARE = View(
    "compare",
    "Compare",
    "Which one is faster, cheaper, carries more?",
    (
        ViewPart("deployments", _deployments, shows_refusals=True),
        ViewPart("served", _served, "quick", help="each of them under this traffic", shows_refusals=True),
    ),
)
