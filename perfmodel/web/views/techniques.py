"""The techniques as a gallery: what each is, what it gains here, what it costs, what has been shown of it."""

__all__ = ["TECHNIQUES", "fields_of"]

import shlex
from collections.abc import Sequence
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.bounded import fewer_requests
from perfmodel.web.views.view import View, ViewPart

_REQUESTS = 100
_LOADS = "traffic.arrivals.rate=0.5x,1x,2x"
_METRICS = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput", "joules_per_output_token")


def _gallery(state: PageState) -> tuple[Question, ...]:
    return (Question("techniques"),)


def _gain(state: PageState) -> tuple[Question, ...]:
    """The deployment with the technique's switch against the same without it."""
    name = state.get("technique")
    if not name:
        return ()
    against, fewer = shlex.join(_switch(name)), fewer_requests(state, _REQUESTS)
    return (Question.of("whatif", state, *fewer, vary=_LOADS, metric=_METRICS, against=against),)


def _switch(name: str) -> Sequence[str]:
    """The overrides that bring a technique. Raises SpecError for a name that is none, and one without a switch."""
    from perfmodel.answers.techniques import answer_techniques

    for row in answer_techniques().data:
        if row["technique"] == name and row["switch"]:
            return list(row["switch"])
        if row["technique"] == name:
            raise SpecError(f"technique: {name} has no switch: {row['why_not_simulated']}")
    raise SpecError(f"technique: there is none called {name[:60]!r}; choose one of the gallery.")


def fields_of(switch: Sequence[str]) -> dict[str, str]:
    """The fields of a page's state that set a switch."""
    from perfmodel.files.yaml_loader import flow_yaml, parse_value

    fields: dict[str, str] = {}
    for text in switch:
        key, _, value = text.partition("=")
        known: Any = parse_value(value, key) if "." not in key and key != "model" else None
        if isinstance(known, dict):
            fields |= {
                f"{key}.{name}": each if isinstance(each, str) else flow_yaml(each) for name, each in known.items()
            }
        else:
            fields[key] = value
    return fields


TECHNIQUES = View(
    "techniques",
    "Techniques",
    "What could be switched on, what would it gain here, and what has been shown of it?",
    (
        ViewPart("gain", _gain, "quick", help="simulating the deployment with it and without it"),
        ViewPart("gallery", _gallery),
    ),
    has_controls=True,
)
