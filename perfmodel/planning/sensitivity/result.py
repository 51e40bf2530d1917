"""`WhatIfResult`: what came of a what-if, as data; it prints itself as `perfmodel whatif` does."""

__all__ = ["WhatIfResult"]

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.planning.sensitivity.crossovers import BoundChange, Payoff
from perfmodel.planning.sensitivity.load import OfferedLoad
from perfmodel.planning.sensitivity.vary import Axis
from perfmodel.planning.sensitivity.whatif import WhatIfAnswers
from perfmodel.planning.sweeps.points import Record
from perfmodel.planning.sweeps.typical_step import StepSpec
from perfmodel.printable import Printable
from perfmodel.trust import trust_of


@dataclass(frozen=True, repr=False)
class WhatIfResult(Printable):
    """Answers, and where they turn.

    step:   the decode step that bounds are of (and metrics of steps); `step_label` as text
    bounds: along the varied values, and along the batch
    largest_batch: of such sequences that an engine can have, and what limits it; 0 where they do not decode
    assumed: sentences on what nobody said of the scenario
    load:    of an axis of arrival rates
    """

    answers: WhatIfAnswers
    step: StepSpec
    step_label: str
    step_bound: str
    bounds: tuple[BoundChange, ...] = ()
    payoffs: tuple[Payoff, ...] = ()
    largest_batch: int = 0
    largest_by: str = ""
    assumed: tuple[str, ...] = ()
    load: OfferedLoad | None = None

    def columns(self) -> dict[str, NDArray[Any]]:
        """Sensitivities as arrays, a row for each path and metric; nan where there is no number."""
        rows = self.answers.sensitivities

        def numbers(values: Sequence[float | None]) -> NDArray[Any]:
            return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

        return {
            "path": np.array([each.axis.path for each in rows]),
            "metric": np.array([each.metric for each in rows]),
            "low_value": np.array([each.axis.texts[0] for each in rows]),
            "high_value": np.array([each.axis.texts[-1] for each in rows]),
            "low": numbers([each.low for each in rows]),
            "base": numbers([each.base for each in rows]),
            "high": numbers([each.high for each in rows]),
            "elasticity": numbers([each.elasticity for each in rows]),
        }

    def to_json(self) -> dict[str, Any]:
        """Every point with its values, sensitivities, changes of bounds and crossovers."""
        answers, question, step = self.answers, self.answers.question, self.step
        return {
            "scenario": answers.scenario.name,
            "metrics": list(question.base.metrics),
            "base": _record(answers.base),
            "sensitivities": [
                {
                    "path": each.axis.path,
                    "metric": each.metric,
                    "low": {"value": each.axis.texts[0], "metric": each.low},
                    "base": {"value": each.axis.present_x, "metric": each.base},
                    "high": {"value": each.axis.texts[-1], "metric": each.high},
                    "elasticity": each.elasticity,
                }
                for each in answers.sensitivities
            ],
            "points": _points(question.axes, answers.by_axis),
            "grid": [{"set": list(key), **_record(record)} for key, record in answers.grid.items()],
            "against": {
                "set": list(question.against),
                "base": _record(answers.other) if answers.other is not None else None,
                "ratio": _ratios(answers.base, answers.other),
                "points": _points(question.axes, answers.others),
            }
            if question.against
            else None,
            "step": {
                "label": self.step_label,
                "bound": self.step_bound,
                "batch": step.batch,
                "context": step.context,
                "prefill": step.prefill,
            },
            "bound_changes": [asdict(change) for change in self.bounds],
            "crossovers": [asdict(each) for each in self.payoffs],
            **({} if self.load is None else {"load": self.load.to_json()}),
            "trust": trust_of(self.answers.scenario).to_json(),
            "provenance": self._provenance(),
        }

    def _provenance(self) -> dict[str, Any]:
        question, scenario = self.answers.question, self.answers.scenario
        inputs = {
            "scenario": resolved(scenario),
            "metrics": list(question.base.metrics),
            "varied": {axis.path: list(axis.texts) for axis in question.axes},
            "against": list(question.against),
        }
        return provenance_of([scenario]).to_json("what-if", inputs)


def _points(axes: Sequence[Axis], records: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    return [
        {"set": text, **_record(record)}
        for axis in axes
        for text, record in zip(axis.overrides, records.get(axis.path, ()), strict=False)
    ]


def _ratios(base: Record, other: Record | None) -> dict[str, float]:
    """What the alternative makes of each metric, as a multiple."""
    found = {} if other is None else other.values
    pairs = {name: (value, base.values.get(name)) for name, value in found.items()}
    return {name: one / before for name, (one, before) in pairs.items() if one is not None and before}


def _record(record: Record) -> dict[str, Any]:
    return {
        "values": dict(record.values),
        **({"interval": {name: list(ends) for name, ends in record.intervals.items()}} if record.intervals else {}),
        **({"problem": record.problem} if record.problem else {}),
    }
