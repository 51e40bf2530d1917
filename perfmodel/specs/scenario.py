"""`Scenario`: model + hardware + engine + traffic + SLO, the file that users copy (design section 3.1)."""

__all__ = ["ClusterSpec", "PriceOverride", "Scenario"]

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from perfmodel.specs.base import Spec
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.model.spec import ModelSpec
from perfmodel.specs.traffic import SLO, Sampling, Traffic


class ClusterSpec(Spec):
    """Equal replicas behind a router."""

    replicas: PositiveInt = 1
    router: Literal["round_robin", "least_outstanding", "prefix_affinity"] = "round_robin"


class PriceOverride(Spec):
    """Overrides the hardware file's price."""

    usd_per_gpu_hour: PositiveFloat


class Scenario(Spec):
    """A scenario with its names resolved: `model` and `hardware` are the specs themselves.

    Built by `perfmodel.specs.load_scenario`, which reads the file (names, paths, overrides) and resolves it.
    """

    name: str
    model: ModelSpec
    hardware: HardwareSpec
    engine: EngineSpec = EngineSpec()
    traffic: Traffic
    sampling: Sampling = Sampling()
    slo: SLO = SLO()
    cluster: ClusterSpec = ClusterSpec()
    price: PriceOverride | None = None
    seed: int = 0
