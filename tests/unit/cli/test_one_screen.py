"""Default answers on a screen of 100 x 40: what commands print where nobody asks for more."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.cli import terminal as cli_terminal
from perfmodel.report.render.terminal import show_document

ROOT = Path(__file__).parents[3]
WIDTH, HEIGHT = 100, 40
FEW = ["--set", "traffic.num_requests=30"]
BENCH = [str(ROOT / "tests" / "data" / "bench" / name) for name in ("vllm.json", "vllm_detailed.json", "sglang.jsonl")]
COMMANDS = {
    "a run": ["simulate", "llama-3.1-8b-a100", *FEW],
    "a run of conversations": ["simulate", "conversations-8b-h100", *FEW],
    "an offline job": ["simulate", "summaries-8b-offline", *FEW],
    "two pools": ["simulate", "llama-3.1-70b-h100-disaggregated", *FEW],
    "a fleet": ["simulate", "llama-3.1-8b-h100-fleet", *FEW],
    "layers in the host's memory": ["simulate", "llama-3.1-70b-rtx-4090-offload", "--set", "traffic.num_requests=2"],
    "an overload": ["simulate", "llama-3.1-8b-a100", *FEW, "--set", "traffic.arrivals.rate=200"],
    "a step": ["explain", "llama-3.1-8b-a100"],
    "a step of many operators": ["explain", "deepseek-v3-2x8-h100"],
    "a step of all kinds of layers": ["explain", "--model", "nemotron-nano-9b-v2", "--hardware", "h100"],
    "memory": ["memory", "deepseek-v3-h200"],
    "memory and its GGUF types": ["memory", "qwen3-30b-a3b-rtx-4090"],
    "what if": ["whatif", "llama-3.1-8b-a100", *FEW],
    "which device": ["whatif", "llama-3.1-8b-a100", *FEW, "--vary", "hardware=h100-sxm-80gb,a100-sxm-80gb"],
    "own load tests": ["validate", "bench", *BENCH, "--model", "llama-3.1-8b", "--hardware", "h100-sxm-80gb"],
}


@pytest.fixture
def screen(monkeypatch):
    """The lines that a command prints on such a terminal, or on another."""

    def lines(arguments, width=WIDTH):
        def show(document):
            written = io.StringIO()
            show_document(document, Console(file=written, width=width, no_color=True))
            print(written.getvalue(), end="")

        monkeypatch.setattr(cli_terminal, "show", show)
        result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1"})
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    return lines


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_the_default_answer_fits_a_screen(arguments, screen):
    found = screen(arguments)
    assert len(found) <= HEIGHT, "\n".join(found)
    assert max(map(len, found)) <= WIDTH
    text = "\n".join(found)
    assert "--details" in text or arguments[0] == "memory"


@pytest.mark.parametrize("name", ["a run", "a step", "memory", "what if", "own load tests"])
def test_its_tables_need_no_more_where_there_is_room(name, screen):
    """As in a pipe, whose lines have no end: nothing is squeezed on a screen of 100."""
    rules = [line for line in screen(COMMANDS[name], width=2 * WIDTH) if line.strip(" ─") == "" and "─" in line]
    assert rules
    assert max(map(len, rules)) <= WIDTH


@pytest.mark.parametrize(
    "arguments",
    [COMMANDS["a run"], COMMANDS["a step of many operators"], COMMANDS["own load tests"]],
    ids=lambda a: a[0],
)
def test_details_have_all_of_it(arguments, screen):
    """More lines, and each figure of the short answer that a table has."""
    brief, details = screen(arguments), screen([*arguments, "--details"])
    assert len(details) > len(brief)
    assert "--details" not in "\n".join(details)


def test_a_run_says_what_it_answers_first(screen):
    """The share of requests within the limits, then latencies, then why, how sure, and what next."""
    text = "\n".join(screen(COMMANDS["a run"]))
    order = ["within the SLO", "TTFT", "Throughput:", "Time bound by:", "Trust:", "Next:"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_short_operators_are_one_row_together(screen):
    """Their sums stand where they stood: the rows' milliseconds add up to the step's."""
    rows = [line.split() for line in screen(COMMANDS["a step of many operators"])]
    table = rows[: next(number for number, row in enumerate(rows) if row[:1] == ["step"]) + 1]
    times = [float(row[row.index(cell) - 1]) for row in table for cell in row if cell[-1] == "%" != cell]
    assert any(row[1:2] == ["others"] for row in table)
    assert sum(times) == pytest.approx(float(table[-1][3]), rel=0.01)
