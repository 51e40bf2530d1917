"""The deployment that serves a rate within its SLO: between devices, how many, with which arguments."""

__all__ = ["PLAN", "SERVICE_LEVELS", "opened", "priced_devices"]

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from perfmodel.web.figures import value_at
from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.view import View, ViewPart

# What a plan chooses itself, whatever the page says of it.
_CHOSEN = (
    *(f"engine.{name}_parallel_size" for name in ("tensor", "pipeline", "data")),
    *("engine.max_num_seqs", "engine.max_num_batched_tokens", "cluster.replicas", "cluster.pools"),
)
SERVICE_LEVELS: tuple[tuple[str, Mapping[str, str | None]], ...] = (
    ("chat: first token in 1 s, then 50 ms each", {"ttft": "1s", "tpot": "50ms", "e2e": None}),
    ("fast chat: 300 ms, then 20 ms", {"ttft": "300ms", "tpot": "20ms", "e2e": None}),
    ("long answers: 5 s, then 100 ms", {"ttft": "5s", "tpot": "100ms", "e2e": None}),
    ("whole answer in 20 s", {"ttft": None, "tpot": None, "e2e": "20s"}),
)


def _plan(state: PageState) -> tuple[Question, ...]:
    """One question. Devices are those that are ticked; without any the deployment's own."""
    devices = state.get("devices")
    planned = state.changed(dict.fromkeys(_CHOSEN))
    if not devices:
        return (Question.of("plan", planned),)
    if state.get("scenario"):
        return (Question.of("plan", planned, f"plan.space.hardware=[{devices}]"),)
    return (Question.of("plan", planned.changed({"hardware": devices})),)


@cache
def priced_devices() -> tuple[tuple[str, float, float], ...]:
    """(name, memory in bytes, USD per hour) of GPUs of which a price is known, the largest memory first."""
    from perfmodel.specs import list_names, load_hardware

    known = [load_hardware(name) for name in list_names("hardware")]
    found = [
        (each.name, each.declared.memory[0].capacity_bytes, each.price.usd_per_hour)
        for each in known
        if each.kind == "gpu" and each.price is not None
    ]
    return tuple(sorted(found, key=lambda each: (-each[1], each[0])))


def opened(state: PageState, data: Any, row: Mapping[str, Any]) -> str:
    """The address's query of the deployment in a plan's row: what the plan has chosen, the rest as it was.

    data: what `perfmodel plan --json` prints
    """
    base = value_at(data, "provenance.inputs.scenario")
    fields: dict[str, str | None] = dict.fromkeys(_CHOSEN)
    for path, value in _flat(row["choices"]):
        if path in _CHOSEN or path == "hardware" or value_at(base, path) != value:
            fields[path] = value if isinstance(value, str) else json.dumps(value)
    return state.changed(fields).query


def _flat(choices: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Choices as paths and values, those of the cluster one by one."""
    cluster = choices.get("cluster") or {}
    whole = [(path, value) for path, value in choices.items() if path != "cluster"]
    return [*whole, *((f"cluster.{name}", value) for name, value in cluster.items())]


PLAN = View(
    "plan",
    "Plan",
    "Which devices, and how many, serve this rate within its service level?",
    (
        ViewPart(
            "choice",
            _plan,
            "long",
            is_asked_for=True,
            button="Find the deployment",
            help="Screens every candidate in closed form and simulates the best: a minute or so. It can be stopped; "
            "what was simulated is kept, and the next start goes on from there.",
        ),
    ),
    has_controls=True,
)
