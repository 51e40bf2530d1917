"""What things are: hardware, models, engines, traffic, scenarios. Frozen and validated; nothing here knows of time.

`load_scenario`, `load_hardware`, `load_traffic` and `load_model` read files by name, alias or path; a mistake in a
file is a `perfmodel.errors.SpecError` with file, line, field, what was found and what is allowed.
"""

from perfmodel.specs.base import Spec
from perfmodel.specs.catalog import data_dir, find_file, list_names
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.hardware import Declared, HardwareSpec, Link, MemoryLevel, Price
from perfmodel.specs.model.cards import load_model
from perfmodel.specs.model.spec import ModelSpec, QuantizationSpec
from perfmodel.specs.scenario import ClusterSpec, PriceOverride, Scenario
from perfmodel.specs.scenario_file import list_hardware, load_hardware, load_scenario, load_traffic
from perfmodel.specs.schema import SCHEMA_KINDS, scenario_schema, schema
from perfmodel.specs.traffic import SLO, Arrivals, Lengths, Prefix, Sampling, Stage, Trace, Traffic
from perfmodel.specs.validation import parse
from perfmodel.specs.yaml_loader import LoadedYaml, Positions, load_yaml

__all__ = [
    "SCHEMA_KINDS",
    "SLO",
    "Arrivals",
    "ClusterSpec",
    "Declared",
    "EngineSpec",
    "HardwareSpec",
    "Lengths",
    "Link",
    "LoadedYaml",
    "MemoryLevel",
    "ModelSpec",
    "Positions",
    "Prefix",
    "Price",
    "PriceOverride",
    "QuantizationSpec",
    "Sampling",
    "Scenario",
    "Spec",
    "Stage",
    "Trace",
    "Traffic",
    "data_dir",
    "find_file",
    "list_hardware",
    "list_names",
    "load_hardware",
    "load_model",
    "load_scenario",
    "load_traffic",
    "load_yaml",
    "parse",
    "scenario_schema",
    "schema",
]
