"""Many scenarios at once, and the numbers that are asked of each.

    metrics.py    one number of a scenario, by name: of a run, of a step, of memory
    capacity.py   the highest arrival rate that meets an SLO
    points.py     a scenario with overrides, and the metrics wanted of it -> a record
    workers.py    any function over many items: in processes (processes.py) or on Ray (on_ray.py), in a fixed order
    sweep.py      the same for points
    vary.py       a path of a scenario and values for it; whatif.py, crossovers.py, ask.py: what they do to metrics
    space.py      the candidates of a plan (candidates.py), and why others are none
    screen.py     their highest rates in closed form: demand.py, surfaces.py (step times), service.py (queues)
    search.py     the plan: choice.py, the simulator on finalists (runs.py, trials.py, store.py), what more money buys
                  (front.py), errors that candidates share (draws.py), plan_result.py and its words, tables, export.py
    study.py      a study's file -> its points; their records by variant and axis
    quality.py    measured quality beside them
    findings.py   who is best where, crossings, gains of a ladder, Pareto fronts

A point knows nothing of what asks for it.
"""

__all__: list[str] = []

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """`perfmodel.plan(...)` plans: the function's name and the room's are one, so the room can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        import perfmodel

        return perfmodel.make_plan(*args, **options)


sys.modules[__name__].__class__ = _Room
