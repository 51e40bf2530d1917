"""A performance model of LLM inference that runs twice: simulated from hardware specs, and executed by the same engine.

    import perfmodel as pm

    result = pm.simulate("llama-3.1-8b-a100", {"engine.max_num_seqs": 64})
    print(result)
    result.summary["mean_tpot_ms"]

Names are loaded on first use: `import perfmodel` costs next to nothing, and torch is never loaded from here.
"""

__all__ = [
    "DoesNotFitError",
    "MissingExtraError",
    "PerfmodelError",
    "Plan",
    "Result",
    "RunResult",
    "Scenario",
    "SpecError",
    "StepTimer",
    "WorkloadError",
    "__version__",
    "build_graph",
    "estimate_step",
    "load_hardware",
    "load_model",
    "load_scenario",
    "make_plan",
    "plan",
    "plan_memory",
    "simulate",
    "step_time",
    "sweep",
    "whatif",
]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perfmodel import renderable
from perfmodel.errors import DoesNotFitError, MissingExtraError, PerfmodelError, SpecError, WorkloadError
from perfmodel.files.blocks import register_block
from perfmodel.version import __version__

if TYPE_CHECKING:
    from perfmodel.api import make_plan, simulate, sweep, whatif
    from perfmodel.api import make_plan as plan
    from perfmodel.cost import estimate_step, plan_memory
    from perfmodel.cost.steps.step_time import StepTimer, step_time
    from perfmodel.ops import build_graph
    from perfmodel.planning.result import PlanResult as Plan
    from perfmodel.sim import RunResult
    from perfmodel.sim import RunResult as Result
    from perfmodel.specs import Scenario, load_hardware, load_model, load_scenario

# Blocks of files that rooms above `specs` answer.
register_block("plan", "perfmodel.planning.spec:PlanSpec")
register_block("study", "perfmodel.planning.study:Study")
_PUBLISHED = "perfmodel.evidence.kinds.published_block"
register_block("published", f"{_PUBLISHED}:Published", f"{_PUBLISHED}:complete")
register_block("technique", "perfmodel.evidence.executed.technique:Technique")

# Results print themselves as the commands show them; what makes their text is loaded on the first print.
renderable.print_with(lambda: import_module("perfmodel.report.terminal"))

# Module -> its names here; a name that is another there, as `name:there`.
_LAZY_NAMES = {
    "perfmodel.api": ("make_plan", "plan:make_plan", "simulate", "sweep", "whatif"),
    "perfmodel.cost": ("estimate_step", "plan_memory"),
    "perfmodel.cost.steps.step_time": ("StepTimer", "step_time"),
    "perfmodel.ops": ("build_graph",),
    "perfmodel.planning.result": ("Plan:PlanResult",),
    "perfmodel.sim": ("Result:RunResult", "RunResult"),
    "perfmodel.specs": ("Scenario", "load_hardware", "load_model", "load_scenario"),
}


def __getattr__(name: str) -> Any:
    for module, entries in _LAZY_NAMES.items():
        for here, _, there in (entry.partition(":") for entry in entries):
            if here == name:
                globals()[name] = value = getattr(import_module(module), there or name)
                return value
    raise AttributeError(f"module 'perfmodel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
