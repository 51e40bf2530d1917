"""A scenario that was read from a command line as the text of its file: each field beside the flag that said it, and in
comments what has no part in time, what has one that is not modelled, and what was assumed."""

__all__ = ["scenario_text"]

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from perfmodel.files.yaml_loader import flow_yaml
from perfmodel.specs.commands.line import LineScenario

_WIDTH = 110
_BLOCKS = ("engine", "cluster", "traffic", "slo", "sampling")


def scenario_text(scenario: LineScenario) -> str:
    """The text of the file, which `load_scenario` reads."""
    lines = list(_heading(scenario))
    for block, value in scenario.data.items():
        if block in _BLOCKS and isinstance(value, Mapping):
            lines.append(f"{block}:")
            lines += [_field(f"  {key}", f"{block}.{key}", each, scenario.sources) for key, each in value.items()]
        else:
            lines.append(_field(block, block, value, scenario.sources))
    return "\n".join(lines) + "\n"


def _heading(scenario: LineScenario) -> Iterator[str]:
    yield from _comment("Read, not run: ", scenario.commands)
    yield from _comment("Affects time and is not modelled: ", [f"{what} ({why})" for what, why in scenario.unmodelled])
    yield from _comment("Note: ", scenario.notes)
    yield from _comment("Assumed: ", scenario.assumed)
    yield from _comment("No part in time: ", scenario.irrelevant)


def _comment(what: str, items: Any) -> Iterator[str]:
    text = "; ".join(_on_one_line(item) for item in items)
    if text:
        yield from textwrap.wrap(
            f"{what}{text}.", _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )


def _field(key: str, path: str, value: Any, sources: Mapping[str, str]) -> str:
    text = f"{key}: {flow_yaml(value)}"
    texts = [
        source
        for place, source in sources.items()
        if (place == path or place.startswith(f"{path}.")) and source not in ("", value)
    ]
    own = "; ".join(_on_one_line(source) for source in dict.fromkeys(texts))
    return f"{text}  # {own}" if own else text


def _on_one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
