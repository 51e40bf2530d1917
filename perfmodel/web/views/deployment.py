"""The deployment at a glance: what it takes, what a step lasts, how to start it."""

__all__ = ["DEPLOYMENT"]

from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.view import View, ViewPart


def _glance(state: PageState) -> tuple[Question, ...]:
    return (Question.of("memory", state), Question.of("explain", state))


def _device(state: PageState) -> tuple[Question, ...]:
    return (Question("hardware show", state.flags["hardware"]),) if "hardware" in state.flags else ()


DEPLOYMENT = View(
    "deployment",
    "Deployment",
    "What does it take, and what does a step last?",
    (ViewPart("glance", _glance), ViewPart("device", _device)),
)
