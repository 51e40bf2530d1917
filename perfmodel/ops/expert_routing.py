"""The routing that a scenario and its engine name."""

__all__ = ["routing_of"]

from perfmodel.ops.capacity import with_capacity
from perfmodel.ops.routing import Routing, power_law_routing, recorded_routing, slowest_uniform_routing
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import ExpertRouting


def routing_of(spec: ExpertRouting, engine: EngineSpec | None = None) -> Routing:
    """How loaded the slowest rank is. Experts that all are alike gain nothing from being placed by popularity."""
    if spec.capacity_factor is not None:
        return with_capacity(spec.capacity_factor)
    num_redundant = engine.eplb_config.num_redundant_experts if engine is not None and engine.enable_eplb else None
    if spec.alpha is not None:
        return power_law_routing(spec.alpha, num_redundant)
    if spec.popularity is not None:
        return recorded_routing(spec.popularity, num_redundant)
    return slowest_uniform_routing
