"""Runs that a page asks for: the whole run, whose figures every view shows, and previews of fewer requests, so that
nobody waits long for a picture of many runs. A template says of a preview that it is one."""

__all__ = ["fewer_requests", "is_preview", "whole_run"]

from perfmodel.web.questions import Question
from perfmodel.web.state import PageState

_FIELD, _DURATION = "traffic.num_requests", "traffic.duration_s"


def whole_run(state: PageState) -> Question:
    """The deployment under its traffic, as `perfmodel simulate` runs it: one run, so every view has its figures."""
    return Question.of("simulate", state)


def fewer_requests(state: PageState, num_requests: int) -> tuple[str, ...]:
    """The value of `--set` that bounds traffic; nothing where the page says itself how many requests there are,
    or for how long they come."""
    return (f"{_FIELD}={num_requests}",) if is_preview(state) else ()


def is_preview(state: PageState) -> bool:
    """Whether pictures of many runs have fewer requests each than the whole run."""
    return not (state.get(_FIELD) or state.get(_DURATION))
