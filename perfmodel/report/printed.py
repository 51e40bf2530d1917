"""Any result as a document, by its kind: how results print themselves in Python, and what commands show."""

__all__ = ["as_html", "as_text", "document_of"]

from importlib import import_module
from typing import Any

from perfmodel.report.document import Document
from perfmodel.report.render.terminal import render_html, render_text

# A result's class -> its view, loaded when one is printed: a run pays nothing for plans.
_VIEWS = {
    "JobPlan": "plan:job_view",
    "MemoryPlan": "memory:memory_view",
    "PlansReport": "plans:plans_view",
    "PlanResult": "plan:plan_view",
    "ResultComparison": "comparison:comparison_view",
    "RunResult": "run:run_view",
    "StepEstimate": "step:estimate_view",
    "StepReport": "step:step_view",
    "StudyResult": "study:study_view",
    "SweepResult": "whatif:sweep_view",
    "ValidationReport": "validation:validation_view",
    "WhatIfResult": "whatif:whatif_view",
}


def document_of(result: Any) -> Document:
    """The document of a result."""
    module, name = next(_VIEWS[kind.__name__] for kind in type(result).__mro__ if kind.__name__ in _VIEWS).split(":")
    document: Document = getattr(import_module(f"perfmodel.report.views.{module}"), name)(result)
    return document


def as_text(result: Any) -> str:
    """What the result's command shows on a terminal, without colours."""
    return render_text(document_of(result))


def as_html(result: Any) -> str:
    """The same as one element of HTML, in colours."""
    return render_html(document_of(result))
