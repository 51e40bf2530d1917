"""Pages and parts of pages: an address as HTML. Knows no HTTP but addresses."""

__all__ = ["Pages"]

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jinja2
from markupsafe import Markup, escape

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.version import __version__
from perfmodel.web.desk import Desk, Finding
from perfmodel.web.drops import without_marks
from perfmodel.web.fields import GROUPS, choices_of, default_of
from perfmodel.web.figures import figure
from perfmodel.web.lines import resolved_fields
from perfmodel.web.pictures.runs import (
    column_bars,
    goodput_curve,
    latency_curve,
    measured_dots,
    memory_bar,
    prompt_curve,
    step_curve,
)
from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views import VIEWS, View, ViewPart
from perfmodel.web.views.choices import CHOICES, FILTERS
from perfmodel.web.views.columns import OF_DEPLOYMENTS, OF_TRAFFIC, compared, headings
from perfmodel.web.views.compare import columns_of, deployment_of, main_of
from perfmodel.web.views.traffic import asked_rate

_PAUSE_MS = 150  # without another move, until a hand rests


class Pages:
    """Draws pages from templates.

    token: that the page sends with what changes state
    """

    def __init__(self, desk: Desk, token: str) -> None:
        self._desk, self._token = desk, token
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("perfmodel.web"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        self._templates.globals |= {
            "asked_rate": asked_rate,
            "choices_of": choices_of,
            "column_bars": column_bars,
            "columns_of": columns_of,
            "compared": compared,
            "default_of": default_of,
            "deployment_of": deployment_of,
            "figure": figure,
            "goodput_curve": goodput_curve,
            "groups": GROUPS,
            "headings": headings,
            "latency_curve": latency_curve,
            "main_of": main_of,
            "measured_dots": measured_dots,
            "memory_bar": memory_bar,
            "of_deployments": OF_DEPLOYMENTS,
            "of_traffic": OF_TRAFFIC,
            "others_of": _others,
            "prompt_curve": prompt_curve,
            "resolved_fields": _resolved_fields,
            "step_curve": step_curve,
            "version": __version__,
            "views": VIEWS,
            **CHOICES,
        }
        self._templates.filters |= {
            "code": _code,
            "drawn": Markup,
            "json": _json,
            "plotted": _plotted,
            "unmarked": without_marks,
            **FILTERS,
        }

    def whole(self, view: View, state: PageState) -> str:
        """The page of a view, with closed forms answered; what was refused before is asked again."""
        self._desk.forget_refusals()
        scenario = self._resolved(state)
        return self._draw("page.html", view, state, token=self._token, scenario=scenario)

    def main(self, view: View, state: PageState) -> str:
        """What stands beside the form."""
        return self._draw("main.html", view, state, scenario=self._resolved(state))

    def answers(self, view: View, state: PageState) -> str:
        """A view without its controls: what changes while one drags. Simulations begin once the hand rests."""
        return self._draw("answers.html", view, state, _PAUSE_MS, scenario=self._resolved(state))

    def part(self, view: View, part: ViewPart, state: PageState, pause_ms: int = 0) -> Markup:
        """One part as it stands: answered, under way, refused, or not begun.

        view, part: of `VIEWS`
        state:      what the address says
        pause_ms:   before the page asks for what is not begun
        """
        try:
            questions = part.ask(state)
        except PerfmodelError as error:
            return self._refused(str(error), [])
        findings = [self._finding(part, question) for question in questions]
        settled = [finding for finding in findings if finding.shown or finding.refusal]
        can_be_drawn = len(settled) == len(findings) and (part.shows_refusals or any(each.shown for each in findings))
        if all(finding.shown for finding in findings) or (len(findings) > 1 and can_be_drawn):
            later = self._later_findings(part, state)
            template = f"views/{view.name}/{part.name}.html"
            drawn = self._draw(template, view, state, part=part, findings=findings, later=later)
            return _kept(part, questions, drawn) if part.is_kept else drawn
        refusal = next((finding.refusal for finding in findings if finding.refusal), "")
        if refusal and not part.shows_refusals:
            return self._refused(refusal, questions)
        jobs = [finding.job for finding in findings if finding.job is not None]
        return self._draw("waiting.html", view, state, part=part, jobs=jobs, pause_ms=pause_ms)

    def rest(self, view: View, part: ViewPart, state: PageState) -> Markup:
        """All that a part's answer says; a part that can show it asks one question.

        Raises SpecError where it is not known any more.
        """
        findings = [self._finding(part, question) for question in part.ask(state)]
        shown = findings[0].shown if findings else None
        if shown is None:
            refusal = findings[0].refusal if findings else ""
            raise SpecError(refusal or "nothing is known of it any more; load the page again.")
        return self._draw("rest.html", view, state, part=part, shown=shown)

    def later(self, view: View, part: ViewPart, state: PageState) -> Markup | None:
        """How far the work is that a part does not wait for; None where nothing more will come."""
        later = self._later_findings(part, state)
        if all(finding.shown or finding.refusal for finding in later):
            return None
        return self._draw("later.html", view, state, part=part, later=later)

    def _later_findings(self, part: ViewPart, state: PageState) -> list[Finding]:
        return [] if part.later is None else [self._desk.look(question) for question in part.later(state)]

    def refused(self, sentence: str) -> str:
        """A page for an address that says nothing that can be shown."""
        return self._draw("refused.html", sentence=sentence)

    def _finding(self, part: ViewPart, question: Question) -> Finding:
        return self._desk.answer(question) if part.lane is None else self._desk.look(question)

    def _resolved(self, state: PageState) -> Any:
        """All fields of the scenario: which defaults count, also where the model does not fit. None for one that cannot
        be."""
        try:
            return resolved_fields(state, self._desk.drops.folder)
        except PerfmodelError:
            return None

    def _refused(self, sentence: str, questions: Sequence[Question]) -> Markup:
        return self._draw("refusal.html", sentence=without_marks(sentence), questions=questions)

    def _draw(
        self, template: str, view: View | None = None, state: PageState | None = None, pause_ms: int = 0, **scene: Any
    ) -> Markup:
        found = self._templates.get_template(template)
        if view is not None and state is not None:
            draw_part = partial(self.part, view, state=state, pause_ms=pause_ms)
            scene |= {"view": view, "state": state, "draw_part": draw_part, "pause_ms": pause_ms}
        return Markup(found.render(**scene))  # templates escape


def _kept(part: ViewPart, questions: Sequence[Question], drawn: Markup) -> Markup:
    """What htmx leaves in its place where what comes has the same id."""
    asked = zlib.crc32(repr(questions).encode())
    return Markup('<div id="{}-{:08x}" hx-preserve="true">{}</div>').format(part.name, asked, drawn)


def _json(value: Mapping[str, Any]) -> str:
    """For an attribute, where the template escapes it."""
    return json.dumps(value, separators=(",", ":"))


def _plotted(figure: Mapping[str, Any]) -> Markup:
    """Attributes of a plot's element: its figure, and the height that it will have: nothing below moves then."""
    height = figure["layout"].get("height")
    style = Markup(' style="min-height: {}px"').format(height) if height else ""
    return Markup('data-figure="{}"{}').format(_json(figure), style)


def _code(text: str) -> Markup:
    """Text with what stands in backticks set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # escaped first


def _others(state: PageState, known: Sequence[str]) -> list[tuple[str, str]]:
    """Fields of the scenario that the form has no field of its own for."""
    return [(key, value) for key, value in state.fields if "." in key and key not in known]


def _resolved_fields(scenario: Any) -> dict[str, str]:
    """What counts in each field that is left empty."""
    fields = (field for group in GROUPS for field in group.fields if field.resolved)
    return {field.key: default_of(field, scenario) for field in fields}
