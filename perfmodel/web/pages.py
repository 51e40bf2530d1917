"""Pages and parts as HTML, and a view as a page that anyone can host: its answers and plots, without form and server.

Knows addresses, but no HTTP."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from perfmodel.commands.request import QUIET, CommandRequest, Console
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.planning.metrics import study_metric
from perfmodel.planning.spec import PlanSpec
from perfmodel.report.plots import whatif
from perfmodel.version import __version__
from perfmodel.web import compare, pictures, views
from perfmodel.web.figures import GROUPS, choices_of, default_of, figure
from perfmodel.web.results import without_marks
from perfmodel.web.service import QueryService, QueryState, resolved_fields
from perfmodel.web.state import PageState, read_state
from perfmodel.web.views import VIEWS, View, ViewPart, find_view

_PAUSE_MS = 150  # without movement until the pointer rests


class Pages:
    """Renders templates. token: sent by the page with state changes."""

    def __init__(self, desk: QueryService, token: str) -> None:
        self._desk, self._token = desk, token
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("perfmodel.web"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        self._templates.globals |= {
            **{"choices_of": choices_of, "default_of": default_of, "figure": figure, "groups": GROUPS},
            **{"compare": compare, "metric_of": study_metric, "pictures": pictures, "plots": whatif},
            "others_of": lambda state, known: [(k, v) for k, v in state.fields if "." in k and k not in known],
            **{"plan_defaults": PlanSpec(), "resolved_fields": _resolved_fields},
            "own_results": lambda state, scenario: compare.own_results(state, scenario, desk.uploads.folder),
            **{"version": __version__, "views": views},
        }
        self._templates.filters |= {
            **{"code": _code, "json": _json, "plotted": _plotted},
            **{"unmarked": without_marks, "cleared": dict.fromkeys},
            "used_in": lambda fields, state: bool(fields) and all(state.get(k) == v for k, v in fields.items()),
        }

    def page(self, view: View, state: PageState, target: str = "") -> str:
        """A view's page with closed forms answered; earlier refusals are retried. target: its `main` content beside the
        form, or its `answers` without controls, updates while dragging, of which simulations start once the pointer
        rests; else all of it"""
        is_whole = target not in ("main", "answers")
        if is_whole:
            self._desk.known.forget_refusals()
        template, pause_ms = "page.html" if is_whole else f"{target}.html", _PAUSE_MS if target == "answers" else 0
        return self._draw(template, view, state, pause_ms, token=self._token, scenario=self._resolved(state))

    def exported(self, view: View, state: PageState) -> str:
        """A view's answers, all of which are known, as a page without server."""
        return self._draw("exported.html", view, state)

    def part(self, view: View, part: ViewPart, state: PageState, pause_ms: int = 0) -> Markup:
        """Part `part` of `view` in `state`, at any stage; pause_ms: delay before the page starts it."""
        try:
            requests = part.ask(state)
        except PerfmodelError as error:
            return self._refused(str(error), [])
        findings = [self._finding(part, request) for request in requests]
        settled = [finding for finding in findings if finding.shown or finding.refusal]
        has_answer = any(finding.shown for finding in findings)
        can_be_drawn = len(settled) == len(findings) and (part.shows_refusals or has_answer)
        if all(finding.shown for finding in findings) or (len(findings) > 1 and can_be_drawn):
            later = self._later_findings(part, state)
            template = [f"views/{view.name}/{part.name}.html", "views/any.html"]
            drawn = self._draw(template, view, state, part=part, findings=findings, later=later)
            if not part.is_kept:
                return drawn
            # What htmx leaves in its place where what comes has the same id.
            asked = zlib.crc32(repr(requests).encode())
            return Markup('<div id="{}-{:08x}" hx-preserve="true">{}</div>').format(part.name, asked, drawn)
        refusal = next((finding.refusal for finding in findings if finding.refusal), "")
        if refusal and not part.shows_refusals:
            return self._refused(refusal, requests)
        jobs = [finding.job for finding in findings if finding.job is not None]
        return self._draw("waiting.html", view, state, part=part, jobs=jobs, pause_ms=pause_ms)

    def rest(self, view: View, part: ViewPart, state: PageState) -> Markup:
        """The full answer of a part with one request. Raises SpecError if it is no longer known."""
        findings = [self._finding(part, request) for request in part.ask(state)]
        shown = findings[0].shown if findings else None
        if shown is None:
            refusal = findings[0].refusal if findings else ""
            raise SpecError(refusal or "nothing is known of it any more; load the page again.")
        return self._draw("rest.html", view, state, part=part, shown=shown)

    def later(self, view: View, part: ViewPart, state: PageState) -> Markup:
        """Progress of a part's deferred requests; what asks for the whole part when they are answered."""
        return self._draw("later.html", view, state, part=part, later=self._later_findings(part, state))

    def _later_findings(self, part: ViewPart, state: PageState) -> list[QueryState]:
        return [] if part.later is None else [self._desk.look(request) for request in part.later(state)]

    def refused(self, sentence: str) -> str:
        """Page for an address that cannot be shown."""
        return self._draw("refused.html", sentence=sentence)

    def _finding(self, part: ViewPart, request: CommandRequest) -> QueryState:
        return self._desk.answer(request) if part.lane is None else self._desk.look(request)

    def _resolved(self, state: PageState) -> Any:
        """Resolved scenario, for defaults, even if the model does not fit; None if invalid."""
        try:
            return resolved_fields(state, self._desk.uploads.folder)
        except PerfmodelError:
            return None

    def _refused(self, sentence: str, requests: Sequence[CommandRequest]) -> Markup:
        return self._draw("refusal.html", sentence=without_marks(sentence), requests=requests)

    def _draw(
        self,
        template: str | Sequence[str],
        view: View | None = None,
        state: PageState | None = None,
        pause_ms: int = 0,
        **scene: Any,
    ) -> Markup:
        chosen = self._templates.get_or_select_template([template] if isinstance(template, str) else [*template])
        if view is not None and state is not None:
            draw_part = partial(self.part, view, state=state, pause_ms=pause_ms)
            scene |= {"view": view, "state": state, "draw_part": draw_part, "pause_ms": pause_ms}
        return Markup(chosen.render(**scene))  # templates escape


def _json(value: Mapping[str, Any]) -> str:
    """JSON for an attribute; the template escapes it."""
    return json.dumps(value, separators=(",", ":"))


def _plotted(figure: Mapping[str, Any]) -> Markup:
    """Plot attributes: figure and height, so that nothing below moves."""
    height = figure["layout"].get("height")
    style = Markup(' style="min-height: {}px"').format(height) if height else ""
    return Markup('data-figure="{}"{}').format(_json(figure), style)


def _code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # escaped first


def _resolved_fields(scenario: Any) -> dict[str, str]:
    fields = (field for group in GROUPS for field in group.fields if field.resolved)
    return {field.key: default_of(field, scenario) for field in fields}


_FILES = ("app.css", "choices.css", "plots.js", "icon.svg", "vendor/plotly-basic.min.js")


def export_page(address: str, folder: Path, console: Console = QUIET) -> None:
    """Write the view of `address`, a path and query as the page has them (`pareto?model=...`), to `folder`: index.html,
    what it needs, and data.json, the answers that it shows. Raises SpecError for an address without such a view, a
    part that is refused, and a folder that cannot be written."""
    name, _, query = address.rpartition("://")[2].partition("?")
    view, state = find_view(name.rpartition("/")[2]), read_state(query)
    if view is None:
        raise SpecError(
            f"--view: got {address[:80]!r}; expected the end of a page's address, as pareto?model=llama-3.1-8b: "
            f"{', '.join(item.name for item in VIEWS)}."
        )
    if state.left_out:
        raise SpecError(f"--view: {' '.join(state.left_out)}")
    service = QueryService()
    try:
        parts = [part for part in view.parts if not part.on_demand]
        requests = [r for part in parts for ask in (part.ask, part.later) if ask is not None for r in ask(state)]
        answers = []
        for done, request in enumerate(requests):
            console.say(f"{done + 1} of {len(requests)}: {request.line}")
            answer = service.answer(request)
            if answer.shown is None:
                raise SpecError(f"{request.line}: {answer.refusal}")
            answers.append({"command": request.line, "answer": answer.shown.data})
        html = Pages(service, "").exported(view, state)
    finally:
        service.uploads.close()  # no worker was started
    static = files("perfmodel.web").joinpath("static")
    content = {name.rpartition("/")[2]: static.joinpath(name).read_bytes() for name in _FILES}
    content["index.html"] = html.encode()
    content["data.json"] = json.dumps(answers, indent=2, allow_nan=False, ensure_ascii=False).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in content.items():
            (folder / file).write_bytes(data)
    except OSError as error:
        raise SpecError(f"--export {folder}: {error.strerror}; name a folder that can be written.") from None
