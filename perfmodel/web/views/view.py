"""`View` and `ViewPart`: a page is a view; its parts ask questions of the state, and templates show the answers."""

__all__ = ["View", "ViewPart"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfmodel.web.jobs import Lane
from perfmodel.web.questions import Question
from perfmodel.web.state import PageState


@dataclass(frozen=True, slots=True)
class ViewPart:
    """A part of a view: `templates/views/<view>/<name>.html` shows its answers.

    ask:     the state's questions, in the order of the template's `findings`
    lane:    who works on them; None: closed forms, answered with the page
    is_asked_for: whether work begins with a click, not with the page
    button:  what is clicked, and what it does
    shows_refusals: whether the template shows what was refused, too
    later:   questions that the part does not wait for: begun once it is there, and drawn into it as the `later` of its
             template, in the long lane, where nobody waits for them
    is_kept: whether the page keeps what it shows, drawn plots too, while the questions stay: of a template that shows
             its answers alone
    drawn: kinds of blocks of its document that its template shows by itself
    """

    name: str
    ask: Callable[[PageState], Sequence[Question]]
    lane: Lane | None = None
    is_asked_for: bool = False
    button: str = "Start"
    help: str = ""
    shows_refusals: bool = False
    later: Callable[[PageState], Sequence[Question]] | None = None
    is_kept: bool = False
    drawn: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """One page. lead: the question that it answers; has_controls: whether `<view>/controls.html` is there"""

    name: str
    title: str
    lead: str
    parts: Sequence[ViewPart]
    has_controls: bool = False
