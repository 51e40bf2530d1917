"""The executed clock: the engine's plans run on real tensors. The only package that imports torch. `import
perfmodel_executors` itself loads nothing heavy; its functions load torch when they are called."""

__all__ = [
    "calibrate_cpu",
    "calibrate_on",
    "execute_on",
    "execute_repeatedly",
    "execute_scenario",
    "explain_occupancy",
    "measure_quality",
    "measure_sensitivity",
    "measure_technique",
    "validate_executor",
]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel_executors.compiled.step import explain_occupancy
    from perfmodel_executors.engines.run import calibrate_on, execute_on
    from perfmodel_executors.measure.calibrate import calibrate_cpu
    from perfmodel_executors.measure.repeated import execute_repeatedly
    from perfmodel_executors.quality.measure import measure_quality
    from perfmodel_executors.quality.sensitivity import measure_sensitivity
    from perfmodel_executors.run import execute_scenario, validate_executor
    from perfmodel_executors.techniques import measure_technique

_LAZY_NAMES = {
    **dict.fromkeys(("execute_scenario", "validate_executor"), "run"),
    "calibrate_cpu": "measure.calibrate",
    **dict.fromkeys(("calibrate_on", "execute_on"), "engines.run"),
    "execute_repeatedly": "measure.repeated",
    "explain_occupancy": "compiled.step",
    "measure_quality": "quality.measure",
    "measure_sensitivity": "quality.sensitivity",
    "measure_technique": "techniques",
}


def __getattr__(name: str) -> Any:
    home = _LAZY_NAMES.get(name)
    if home is None:
        raise AttributeError(f"module 'perfmodel_executors' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"perfmodel_executors.{home}"), name)
