"""Command lines of servers, read as scenarios that load."""

__all__ = ["read_engine", "read_loadable"]

from pathlib import Path
from typing import Any

from perfmodel.specs import load_scenario
from perfmodel.specs.commands.line import Asking, LineScenario, read_line
from perfmodel.specs.scenario_source import as_text


def read_loadable(text: str, folder: Path | None = None, *, hardware: str) -> LineScenario:
    """Read a command line and check that its scenario loads.

    folder: of the files that the line names
    """
    line = read_line(text, Asking(hardware=hardware, folder=folder or Path()))
    line.data.setdefault("traffic", "chat-sharegpt")
    assert load_scenario(as_text({"name": "x", **line.data}))
    return line


def read_engine(text: str, *, hardware: str) -> dict[str, Any]:
    """The `engine` block of a command line."""
    return dict(read_loadable(text, hardware=hardware).data["engine"])
