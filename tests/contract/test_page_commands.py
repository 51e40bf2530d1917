"""Every command in README.md, CONTRIBUTING.md and docs/ is one: its flags are there, and it runs, here on little.

`python benchmarks/page_commands.py` runs them as they are written.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import typer
from click import UsageError
from typer.testing import CliRunner

from perfmodel.cli import app

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("page_commands", ROOT / "benchmarks/page_commands.py")
assert _spec is not None
assert _spec.loader is not None
page_commands = importlib.util.module_from_spec(_spec)
sys.modules["page_commands"] = page_commands
_spec.loader.exec_module(page_commands)

COMMANDS = [command for page in page_commands.PAGES for command in page_commands.commands_of(page)]
BY_PAGE = {
    page: [each for each in page_commands.commands_of(page) if not (each.is_named or each.needs_torch)]
    for page in page_commands.PAGES
}
FEW = ("--set", "traffic.num_requests=8")
SMALL = (
    *("--set", "plan.seeds=1", "--set", "plan.num_requests=30", "--set", "plan.finalists=1"),
    *("--set", "plan.space.max_num_seqs=[64]", "--set", "plan.space.max_num_batched_tokens=[8192]"),
)
# Not even on little: studies check what they are of instead, a folder of figures is read by other tests, and a server
# serves until it is told to end; another one would have to be there to be watched.
LONG, MAX_LONG = ("plan", "whatif"), 2  # of one page
TOO_MUCH = ("study", "whatif coding-agents", "validate published workloads", "serve", "watch", "web")


def words_of(command):
    """The words of a command, on little traffic."""
    words = command.words
    if words[0] in ("simulate", "whatif") or (words[0] == "compare" and not words[1].endswith(".json")):
        return [*words, *FEW]
    if words[0] != "plan":
        return words
    job = () if "summaries-8b-offline" not in words else ("--set", "plan.deadline_s=null")
    return [*words, *SMALL, *job, *(FEW if job else ())]


def test_the_pages_have_commands():
    assert len([each for each in COMMANDS if not each.is_named]) > 60


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page.name}: {command.text}"[:70])
def test_a_command_has_the_flags_that_the_page_gives_it(command):
    found, words = typer.main.get_command(app), list(command.words)
    while words and hasattr(found, "commands") and words[0] in found.commands:
        found = found.commands[words.pop(0)]
    if command.is_named:
        known = {option for parameter in found.params for option in parameter.opts} | {"--install-completion"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
        return
    try:
        found.make_context("perfmodel", words)
    except UsageError as error:
        pytest.fail(f"{command.text}: {error.format_message()}")


@pytest.mark.parametrize("page", [page for page in BY_PAGE if BY_PAGE[page]], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch):
    """One after the other in one folder, as a reader would: a later one reads what an earlier one wrote."""
    page_commands.prepared_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    num_long = 0
    for command in BY_PAGE[page]:
        if " ".join(command.words).startswith(TOO_MUCH):
            continue
        num_long += command.words[0] in LONG
        if command.words[0] in LONG and num_long > MAX_LONG and command.output is None:
            continue  # `benchmarks/page_commands.py` runs all
        found = CliRunner().invoke(app, words_of(command))
        right = (2,) if command.is_refused else (0, 1) if command.words[0] == "plan" else (0,)
        assert found.exit_code in right, (command.text, found.output)
        assert found.exception is None or isinstance(found.exception, SystemExit), command.text
        if command.output is not None:
            (tmp_path / command.output).write_text(found.stdout, encoding="utf-8")
