"""`Scenario`: model + hardware + engine + traffic + SLO, the file that users copy (design section 3.1)."""

__all__ = ["ClusterSpec", "PriceOverride", "Scenario"]

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PositiveFloat, PositiveInt
from pydantic_core import CoreSchema, core_schema

from perfmodel.specs.base import Spec
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.model.spec import ModelSpec
from perfmodel.specs.traffic import SLO, Sampling, Traffic


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A field that is a name in the file and the finished spec here: only its type is checked, nothing is copied."""

    description: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(source)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "description": self.description}


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
    model: Annotated[
        ModelSpec,
        _Resolved("A name in workloads/models, or a path to a model card or a Hugging Face config.json"),
    ]
    hardware: Annotated[HardwareSpec, _Resolved("A name in hardware_specs, or a path to a hardware file")]
    engine: EngineSpec = EngineSpec()
    traffic: Traffic
    sampling: Sampling = Sampling()
    slo: SLO = SLO()
    cluster: ClusterSpec = ClusterSpec()
    price: PriceOverride | None = None
    seed: int = 0
