"""A command with a view of the page is a few edits: its request, its row, its view, and the list of what is frozen."""

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILES = 6
REQUEST = '''

@dataclass(frozen=True)
class HeadroomRequest(ScenarioRequest):
    """Say how many tokens more the KV cache could keep."""

    command = "headroom"
    examples = ("headroom llama-3.1-8b-a100 --kept 1k",)
    scenario_flags = req.MEMORY_FLAGS

    kept: int | None = flag("--kept", "Tokens that are kept already.", metavar="N", is_count=True)

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request."""
        from perfmodel.report.document import Document, Paragraph

        plan = MemoryRequest(self.scenario, flags=self.flags, overrides=self.overrides).answer().result
        left = plan.max_tokens - (self.kept or 0)
        document = Document("Headroom", [Paragraph(f"{left} tokens more.")])
        return Answer(lambda: {"tokens": left}, lambda: document, left)
'''
VIEW = """

def _headroom(state: PageState) -> tuple[CommandRequest, ...]:
    from perfmodel.commands.runs import HeadroomRequest

    return (request_of(HeadroomRequest, state, kept=1000),)


VIEWS = (*VIEWS, View("headroom", "Headroom", "How much more could it keep?", (ViewPart("left", _headroom),)))
"""
PAGE = """
from perfmodel.web.pages import Pages
from perfmodel.web.service import QueryService
from perfmodel.web.state import read_state
from perfmodel.web.views import find_view

print(Pages(QueryService(), "token").page(find_view("headroom"), read_state("model=llama-3.1-8b&hardware=h100")))
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package, of the frozen commands and of the page for contributors."""
    for name in ("perfmodel", "tests/contract/test_command_surface.py", "CONTRIBUTING.md"):
        source, copy = ROOT / name, tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    for name in ("hardware_specs", "workloads", "reports", "measurements"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def changed(checkout, folder="perfmodel"):
    """Files that differ from those of this checkout, or are new."""
    compared = filecmp.dircmp(ROOT / folder, checkout / folder, ignore=["__pycache__"])
    below = [name for sub in compared.common_dirs for name in changed(checkout, f"{folder}/{sub}")]
    return [*(f"{folder}/{name}" for name in (*compared.diff_files, *compared.right_only)), *below]


def edit(file, before, after):
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after, 1), encoding="utf-8")


def test_a_command_with_a_view_of_the_page_takes_at_most_six_files(checkout):
    pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")
    runs, views = checkout / "perfmodel/commands/runs.py", checkout / "perfmodel/web/views.py"
    edit(runs, "\n\n# ---------------------------------------------------------------- two results", REQUEST)
    row = '    "memory": f"{_RUNS}:MemoryRequest",\n'
    edit(checkout / "perfmodel/cli/__init__.py", row, row + '    "headroom": f"{_RUNS}:HeadroomRequest",\n')
    views.write_text(views.read_text(encoding="utf-8") + VIEW, encoding="utf-8")
    surface = "tests/contract/test_command_surface.py"
    edit(
        checkout / surface,
        "FROZEN = {\n",
        'FROZEN = {\n    "headroom": ["SCENARIO", "--set", "--kept", "--json", "--model", "--hardware"],\n',
    )
    files = [*changed(checkout), *([surface] if not filecmp.cmp(ROOT / surface, checkout / surface) else [])]
    assert len(files) == 4 <= MAX_FILES

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout

    flags = ("--model", "llama-3.1-8b", "--hardware", "h100")
    memory = json.loads(run("-m", "perfmodel", "memory", *flags, "--json"))
    left = json.loads(run("-m", "perfmodel", "headroom", *flags, "--kept", "1000", "--json"))["tokens"]
    assert left == memory["max_tokens"] - 1000
    assert "Tokens that are kept already." in run("-m", "perfmodel", "headroom", "--help")
    page = run("-c", PAGE)
    assert f"{left} tokens more." in page
    assert "perfmodel headroom --model llama-3.1-8b --hardware h100 --kept 1000" in page
