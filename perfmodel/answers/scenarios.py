"""The scenarios and traffic that come along, one of them as resolved, and a file of what flags say: `perfmodel
scenarios list|show|new`."""

__all__ = ["answer_scenarios", "new_scenario_text", "resolved_scenario"]

from typing import Any

from perfmodel.answers.answer import Answer
from perfmodel.answers.asked import Asked
from perfmodel.errors import SpecError


def answer_scenarios(every: bool = False) -> Answer:
    """The scenarios, and the traffic that `--traffic` names; `every`: also those of studies and publications."""
    from perfmodel.report.views.catalog import scenarios_view
    from perfmodel.specs.examples import scenario_files, traffic_files

    found, traffic = scenario_files(every), traffic_files()
    return Answer(lambda: {"scenarios": found, "traffic": traffic}, lambda: scenarios_view(found, traffic))


def resolved_scenario(name: str) -> dict[str, Any]:
    """All fields of a scenario. Raises SpecError as `load_scenario` does."""
    from perfmodel import specs
    from perfmodel.cost.calibrations.provenance import resolved

    fields: dict[str, Any] = resolved(specs.load_scenario(name))
    return fields


def new_scenario_text(asked: Asked) -> str:
    """The scenario file that flags stand for in other commands. Raises SpecError without a model and a device."""
    from perfmodel.files.yaml_loader import dump_yaml

    if not {"model", "hardware"} & set(asked.given):
        raise SpecError("no model: give --model and --hardware, as in --model llama-3.1-8b --hardware h100.")
    return dump_yaml(asked.data())
