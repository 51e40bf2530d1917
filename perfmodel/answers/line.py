"""The scenario of a command line as it is, of a server and of a load test; never executed: `perfmodel new`."""

__all__ = ["LineAnswer", "answer_line"]

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.answers.asked import LIMITS, TRAFFIC, Asked
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.specs.commands.line import LineScenario


@dataclass(frozen=True)
class LineAnswer:
    """text: of the scenario file; warnings: of what affects time and is not modelled; data: the file's mapping."""

    text: str
    warnings: tuple[str, ...]
    data: dict[str, Any]


def answer_line(
    text: str, asked: Asked, place: str = "line", folder: Path | None = None, strict: bool = False
) -> LineAnswer:
    """What the line says, completed by the flags, and by what is assumed where neither says it.

    text:   a command line, a script, a compose file or a manifest
    asked:  flags beside it
    place:  what errors call the text
    folder: that files which the line names are in; by default the current one
    strict: what affects time and is not modelled is refused; else it is a warning

    Raises SpecError, in one sentence: for unknown flags, for what is missing, for a scenario that cannot be.
    """
    from perfmodel.specs import load_scenario
    from perfmodel.specs.commands.line import scenario_text
    from perfmodel.specs.scenario_source import as_text

    found = _scenario(text, place, folder or Path(), asked)
    for what, why in found.unmodelled if strict else ():
        raise SpecError(
            f"--strict: {what}: affects time and is not modelled ({why}); take it out of the line, or leave out "
            f"--strict."
        )
    load_scenario(as_text(found.data, found.sources))
    warnings = tuple(f"{what}: affects time and is not modelled ({why})" for what, why in found.unmodelled)
    return LineAnswer(scenario_text(found), warnings, found.data)


def _scenario(text: str, place: str, folder: Path, asked: Asked) -> "LineScenario":
    """What the line says, completed by the flags, and by what is assumed where neither says it."""
    from dataclasses import replace

    from perfmodel.specs.commands.line import Asking, read_line
    from perfmodel.specs.shorthand import name_of, scenario_name

    given = asked.given
    own: dict[str, Any] = {}
    if {"traffic", *LIMITS} & set(given):
        blocks = Asked(None, {**asked.flags, "model": "-", "hardware": given.get("hardware", "cpu")}).data()
        own = {key: blocks[key] for key in ("traffic", "slo") if key in blocks and (key == "slo" or "traffic" in given)}
    flags = {block: f"--{block}" for block in own}
    device = name_of("hardware", given["hardware"]) if "hardware" in given else None
    asking = Asking(given.get("model"), device, own, flags, folder)
    line_scenario = read_line(text, asking, place)
    assumed = []
    if "traffic" not in line_scenario.data:
        blocks = Asked(None, {**asked.flags, "model": "-", "hardware": line_scenario.data["hardware"]}).data()
        line_scenario.data["traffic"] = blocks["traffic"]
        assumed.append(f"traffic {TRAFFIC}, as the line has no load test (--traffic, --rate)")
    elif "rate" in given and "traffic" not in given:
        from perfmodel.files.yaml_loader import parse_value

        arrivals = {"process": "poisson", "rate": parse_value(given["rate"], "--rate")}
        line_scenario.data["traffic"] = {**line_scenario.data["traffic"], "arrivals": arrivals}
    name = scenario_name(line_scenario.data["model"], line_scenario.data["hardware"])
    return replace(line_scenario, data={"name": name, **line_scenario.data}, assumed=(*line_scenario.assumed, *assumed))
