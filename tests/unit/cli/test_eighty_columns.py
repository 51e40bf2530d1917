"""On a terminal of 80 columns: every command's tables whole, nothing cut, nothing broken, no line too long."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.report.document import Commands, Facts, Table, plain
from perfmodel.report.render import terminal

FEW = ["--set", "traffic.num_requests=20"]
AGAINST = ["--vary", "traffic.arrivals.rate=1,4", "--against", "engine.quantization=w4a16"]
COMMANDS = {
    "simulate": ["simulate", "llama-3.1-8b-a100", *FEW],
    "simulate a fleet": ["simulate", "llama-3.1-8b-a100", *FEW, "--set", "cluster.pools=[{share: 0.5}, {share: 0.5}]"],
    "explain": ["explain", "llama-3.1-8b-a100"],
    "explain a run": ["explain", "llama-3.1-8b-a100", "--run", *FEW],
    "roofline": ["roofline", "llama-3.1-8b-a100"],
    "memory": ["memory", "llama-3.1-8b-a100"],
    "what if, one by one": ["whatif", "llama-3.1-8b-a100", *FEW, "--vary", "hardware.hbm.bandwidth=0.5x..2x:3"],
    "what if, beside an alternative": ["whatif", "llama-3.1-8b-a100", *FEW, *AGAINST],
    "compare": ["compare", "llama-2-7b-a100-batch1", "tiny-llama-cpu"],
    "hardware": ["hardware", "list"],
    "every CPU": ["hardware", "list", "--kind", "cpu"],
    "some GPUs": ["hardware", "list", "--maker", "nvidia", "--name", "rtx"],
    "a device": ["hardware", "show", "gb200"],
    "models": ["models", "list"],
    "a model": ["models", "show", "deepseek-v3"],
    "techniques": ["techniques"],
    "study": ["study", "kv_caching", "--quick"],
    "plan": [
        *("plan", "llama-3.1-8b-a100", *FEW, "--set", "plan.finalists=2", "--set", "plan.seeds=1"),
        *("--set", "plan.space.hardware=[a100-sxm-80gb, h100-sxm-80gb]"),
    ],
    "offline plan": ["plan", "summaries-8b-offline", "--set", "plan.finalists=2", "--set", "plan.seeds=1"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_every_table_is_whole_on_eighty_columns(arguments, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(terminal, "show_document", lambda document, console: shown.append(document))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    show_document = SHOW
    found = CliRunner().invoke(app, arguments)
    assert shown, found.output
    for document in shown:
        console = Console(file=io.StringIO(), width=80, force_terminal=False)
        show_document(document, console)
        text = console.file.getvalue()
        assert "…" not in text
        assert [line for line in text.splitlines() if len(line) > 80 and line not in to_copy(document)] == []
        words = set(text.split())
        for block in document.blocks:
            assert missing(block, words) == set()


def to_copy(document):
    """Lines for a shell, which would not run broken."""
    return [line for block in document.blocks if isinstance(block, Commands) for line in block.lines]


SHOW = terminal.show_document


def missing(block, words):
    """Words of a table's cells and heads (but the first, of the rows' names), or of facts, that are not shown."""
    wanted = []
    if isinstance(block, Table) and block.rows:
        count = len(block.head) - block.num_wide
        cells = [*block.head[1:count], *(plain(cell) for row in (*block.rows, block.total) for cell in row[:count])]
        wanted = [word for cell in cells for word in cell.split()]
    if isinstance(block, Facts):
        wanted = [word for _, facts in block.groups for fact in facts for word in (fact.value, fact.unit) if word]
        wanted = [word for each in wanted for word in each.split()]
    stripped = {word.strip(",") for word in words}
    return {word for word in wanted if word.strip(",") not in stripped}
