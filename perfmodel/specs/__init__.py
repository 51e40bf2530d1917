"""Frozen, validated specs: hardware, models, engines, traffic, scenarios; no costs, no simulated time.

`load_scenario`, `load_hardware`, `load_traffic` and `load_model` read files by name, alias or path; a mistake is a
`perfmodel.errors.SpecError` with file, line, field, value and what is allowed. Names load on first use."""

__all__ = [
    "SCHEMA_KINDS",
    "SLO",
    "Arrivals",
    "ClusterSpec",
    "EngineSpec",
    "ExpertRouting",
    "HardwareSpec",
    "KvTransferSpec",
    "Lengths",
    "Link",
    "ModelSpec",
    "PoolSpec",
    "Prefix",
    "Sampling",
    "Scenario",
    "Stage",
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
    "load_tables",
    "load_traffic",
    "load_yaml",
    "scenario_schema",
    "schema",
]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.files.catalog import data_dir, find_file, list_names
    from perfmodel.files.yaml_loader import load_yaml
    from perfmodel.models.cards import list_models, load_model
    from perfmodel.models.spec import ModelSpec
    from perfmodel.specs.cluster import ClusterSpec, KvTransferSpec, PoolSpec
    from perfmodel.specs.devices import load_tables
    from perfmodel.specs.engine.spec import EngineSpec
    from perfmodel.specs.hardware import HardwareSpec
    from perfmodel.specs.json_schema import SCHEMA_KINDS, scenario_schema, schema
    from perfmodel.specs.networks import Link, find_network, list_networks, load_network
    from perfmodel.specs.scenario import Scenario
    from perfmodel.specs.scenario_file import list_hardware, load_hardware, load_scenario, load_traffic
    from perfmodel.specs.slo import SLO
    from perfmodel.specs.traffic import Arrivals, ExpertRouting, Lengths, Prefix, Sampling, Stage, Traffic

_NAMES = {
    "perfmodel.files.catalog": "data_dir find_file list_names",
    "perfmodel.files.yaml_loader": "load_yaml",
    "perfmodel.models.cards": "list_models load_model",
    "perfmodel.models.spec": "ModelSpec",
    "perfmodel.specs.cluster": "ClusterSpec KvTransferSpec PoolSpec",
    "perfmodel.specs.devices": "load_tables",
    "perfmodel.specs.engine.spec": "EngineSpec",
    "perfmodel.specs.hardware": "HardwareSpec",
    "perfmodel.specs.json_schema": "SCHEMA_KINDS scenario_schema schema",
    "perfmodel.specs.networks": "Link find_network list_networks load_network",
    # `Scenario.with_` reads files anew
    "perfmodel.specs.scenario_file": "Scenario list_hardware load_hardware load_scenario load_traffic",
    "perfmodel.specs.slo": "SLO",
    "perfmodel.specs.traffic": "Arrivals ExpertRouting Lengths Prefix Sampling Stage Traffic",
}
_LAZY_NAMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _LAZY_NAMES.get(name)
    if home is None:
        raise AttributeError(f"module 'perfmodel.specs' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
