"""What things are: hardware, models, engines, traffic, scenarios. Frozen and validated; nothing here knows of time.

`load_scenario`, `load_hardware`, `load_traffic` and `load_model` read files by name, alias or path; a mistake in a
file is a `perfmodel.errors.SpecError` with file, line, field, what was found and what is allowed.

Names are loaded on first use, so a module that needs one spec does not pay for reading YAML.
"""

__all__ = [
    "SCHEMA_KINDS",
    "SLO",
    "Acceptance",
    "Arrivals",
    "ClusterSpec",
    "Declared",
    "EngineSpec",
    "ExpertRouting",
    "HardwareSpec",
    "KvTransferSpec",
    "Lengths",
    "Link",
    "LoadedYaml",
    "Lookahead",
    "MeasuredAcceptance",
    "MemoryLevel",
    "ModelSpec",
    "NetworkFile",
    "NetworkSpec",
    "PlanSpace",
    "PlanSpec",
    "PoolSpec",
    "Positions",
    "Prefix",
    "Price",
    "PriceOverride",
    "QuantizationSpec",
    "Sampling",
    "Scenario",
    "Spec",
    "SpeculativeConfig",
    "Stage",
    "Trace",
    "Traffic",
    "data_dir",
    "find_file",
    "find_network",
    "list_hardware",
    "list_models",
    "list_names",
    "list_networks",
    "load_hardware",
    "load_model",
    "load_network",
    "load_scenario",
    "load_traffic",
    "load_yaml",
    "parse",
    "scenario_schema",
    "schema",
]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.specs.base import Spec
    from perfmodel.specs.catalog import data_dir, find_file, list_names
    from perfmodel.specs.cluster import ClusterSpec, KvTransferSpec
    from perfmodel.specs.engine import EngineSpec
    from perfmodel.specs.hardware import Declared, HardwareSpec, MemoryLevel, Price
    from perfmodel.specs.json_schema import SCHEMA_KINDS, scenario_schema, schema
    from perfmodel.specs.link import Link
    from perfmodel.specs.model.cards import list_models, load_model
    from perfmodel.specs.model.spec import ModelSpec, QuantizationSpec
    from perfmodel.specs.network import NetworkSpec
    from perfmodel.specs.network_file import NetworkFile, find_network, list_networks, load_network
    from perfmodel.specs.plan import PlanSpace, PlanSpec
    from perfmodel.specs.scenario import PriceOverride, Scenario
    from perfmodel.specs.scenario_file import list_hardware, load_hardware, load_scenario, load_traffic
    from perfmodel.specs.slo import SLO
    from perfmodel.specs.speculation import Acceptance, Lookahead, MeasuredAcceptance, SpeculativeConfig
    from perfmodel.specs.traffic import Arrivals, ExpertRouting, Lengths, Prefix, Sampling, Stage, Trace, Traffic
    from perfmodel.specs.validation import parse
    from perfmodel.specs.yaml_loader import LoadedYaml, Positions, load_yaml

_HOMES = {
    "SCHEMA_KINDS": "json_schema",
    "SLO": "slo",
    "Acceptance": "speculation",
    "Arrivals": "traffic",
    "ClusterSpec": "cluster",
    "Declared": "hardware",
    "EngineSpec": "engine",
    "HardwareSpec": "hardware",
    "KvTransferSpec": "cluster",
    "Lengths": "traffic",
    "Link": "link",
    "LoadedYaml": "yaml_loader",
    "Lookahead": "speculation",
    "MeasuredAcceptance": "speculation",
    "MemoryLevel": "hardware",
    "ModelSpec": "model.spec",
    "NetworkFile": "network_file",
    "NetworkSpec": "network",
    "PlanSpace": "plan",
    "PlanSpec": "plan",
    "PoolSpec": "pool",
    "Positions": "yaml_loader",
    "Prefix": "traffic",
    "Price": "hardware",
    "PriceOverride": "scenario",
    "QuantizationSpec": "model.spec",
    "ExpertRouting": "traffic",
    "Sampling": "traffic",
    "Scenario": "scenario",
    "Spec": "base",
    "SpeculativeConfig": "speculation",
    "Stage": "traffic",
    "Trace": "traffic",
    "Traffic": "traffic",
    "data_dir": "catalog",
    "find_file": "catalog",
    "find_network": "network_file",
    "list_hardware": "scenario_file",
    "list_models": "model.cards",
    "list_names": "catalog",
    "list_networks": "network_file",
    "load_hardware": "scenario_file",
    "load_model": "model.cards",
    "load_network": "network_file",
    "load_scenario": "scenario_file",
    "load_traffic": "scenario_file",
    "load_yaml": "yaml_loader",
    "parse": "validation",
    "scenario_schema": "json_schema",
    "schema": "json_schema",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'perfmodel.specs' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"perfmodel.specs.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
