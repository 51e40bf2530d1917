"""Every command's help ends with lines that can be typed: flags, scenarios, studies and overrides are known."""

import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from perfmodel.cli import COMMANDS as PLACES
from perfmodel.cli import FIRST, app
from perfmodel.errors import SpecError
from perfmodel.planning.study import load_study
from perfmodel.specs import find_file, load_hardware, load_model, load_scenario

ROOT = Path(__file__).resolve().parents[3]


def requests():
    """Every request, as the table of commands has them."""
    for place in PLACES.values():
        for one in [place] if isinstance(place, str) else place.values():
            module, name = one.split(":")
            yield getattr(import_module(module), name)


EXAMPLES = {request.command: request.examples for request in requests()}
LINES = [(command, line) for command, lines in EXAMPLES.items() for line in lines]


def leaves(command, name=""):
    """(name, command) of every command that does something."""
    if not hasattr(command, "commands"):
        return [(name, command)]
    return [leaf for sub, each in command.commands.items() for leaf in leaves(each, f"{name} {sub}".strip())]


COMMANDS = dict(leaves(typer.main.get_command(app)))


def test_every_command_has_an_example():
    assert set(EXAMPLES) == set(COMMANDS)
    assert all(EXAMPLES.values())


@pytest.mark.parametrize(("command", "line"), LINES)
def test_the_parser_takes_it_and_its_names_are_known(command, line):
    words = shlex.split(line)
    own = command.split()
    assert words[: len(own)] == own
    given = COMMANDS[command].make_context(command, words[len(own) :]).params
    overrides = [text for text in given.get("overrides") or () if not text.startswith("model=")]
    for argument in ("scenario", "one", "other"):
        if given.get(argument) and not given[argument].endswith(".json"):
            load_scenario(given[argument], overrides)
    if command == "study":
        load_study(given["study"] if "study" in given else words[1])
    if given.get("model"):
        load_model(given["model"])
    for device in (given.get("hardware") or given.get("like") or "").split(","):
        if device:
            load_hardware(device)
    if given.get("traffic"):
        find_file("traffic", given["traffic"])


def test_examples_of_paths_in_the_checkout_are_there():
    for _, line in LINES:
        for word in shlex.split(line):
            if word.startswith("workloads/"):
                assert (ROOT / word).exists()


@pytest.mark.parametrize("command", ["simulate", "plan", "hardware new", "scenarios list"])
def test_help_shows_them_in_eighty_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [*command.split(), "--help"]).stdout
    assert "Examples:" in shown
    together = " ".join(shown.split())
    for line in EXAMPLES[command]:
        assert f"perfmodel {line}" in together
    assert max(map(len, shown.splitlines())) <= 80


def test_a_name_that_is_not_known_would_be_found():
    with pytest.raises(SpecError):
        load_scenario("llama-3.1-8b-a1000")


@pytest.mark.release
def test_without_a_command_three_that_answer_are_shown(run):
    """Each is run as it stands there."""
    text = run().output
    commands = [
        line.strip().removeprefix("perfmodel ") for line in text.splitlines() if line.startswith("    perfmodel ")
    ]
    assert commands == list(FIRST.values())
    assert len(commands) == 3
    assert len(text.splitlines()) <= 20
    for command in commands:
        assert run(*shlex.split(command)).exit_code == 0
