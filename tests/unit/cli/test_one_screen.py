"""Default answers on a screen of 100 x 40: what commands print where nobody asks for more."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.cli import terminal as cli_terminal
from perfmodel.report.terminal import show_document
from perfmodel.specs import load_scenario
from perfmodel.trust import trust_of

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
    "memory and its groups of layers": ["memory", "--model", "gpt-oss-20b", "--hardware", "h100"],
    "what if": ["whatif", "llama-3.1-8b-a100", *FEW],
    "which device": ["whatif", "llama-3.1-8b-a100", *FEW, "--vary", "hardware=h100-sxm-80gb,a100-sxm-80gb"],
    "own load tests": ["validate", "bench", *BENCH, "--model", "llama-3.1-8b", "--hardware", "h100-sxm-80gb"],
}


@pytest.fixture
def screen(monkeypatch):
    """The lines that a command prints on such a terminal."""

    def show(document, _piped_width=None):
        written = io.StringIO()
        show_document(document, Console(file=written, width=WIDTH, no_color=True))
        print(written.getvalue(), end="")

    def lines(arguments):
        monkeypatch.setattr(cli_terminal, "show", show)
        result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1"})
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    return lines


@pytest.mark.release
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_the_default_answer_fits_a_screen(arguments, screen):
    found = screen(arguments)
    assert len(found) <= HEIGHT, "\n".join(found)
    assert max(map(len, found)) <= WIDTH
    text = "\n".join(found)
    assert "--details" in text or arguments[0] == "memory"


WIDE = {
    "a step of long names": ["explain", "deepseek-v3-h200"],
    "latencies of minutes, with intervals": [
        "simulate",
        "llama-3.1-70b-rtx-4090-offload",
        *FEW[:1],
        "traffic.num_requests=4",
    ],
    "what if, with them": ["whatif", "llama-3.2-3b-ryzen-9-7950x", *FEW[:1], "traffic.num_requests=4"],
}


@pytest.mark.release
@pytest.mark.parametrize("arguments", [*COMMANDS.values(), *WIDE.values()], ids=[*COMMANDS, *WIDE])
def test_tables_fit_the_width_in_a_pipe_too(arguments):
    """Sentences in a pipe are not wrapped; tables keep the width of a screen."""
    result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    rules = [line.rstrip() for line in result.stdout.splitlines() if line.strip(" ─") == "" and "─" in line]
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


@pytest.mark.parametrize(
    ("command", "order"),
    [
        ("a run", ["SLO met", "p99", "Throughput:", "Time bound by:", "Trust:", "Next:"]),
        ("a step", ["ms a step", "bound by", "down_proj", "Trust:", "Next:"]),
        ("memory", ["It fits:", "weights:", "usable", "KV cache:", "Trust of step times:", "Next:"]),
        ("what if", ["HBM bandwidth", "Trust:", "Next:"]),
    ],
)
def test_the_result_comes_first_then_reasons_trust_and_next_steps(command, order, screen):
    text = "\n".join(screen(COMMANDS[command]))
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.release
def test_every_command_prints_the_same_badge(screen):
    """The errors of predictions of comparable setups in per cent, from `trust_of`."""
    badge = trust_of(load_scenario("llama-3.1-8b-a100")).badge
    assert re.search(r"rows like this: .*TPOT \d+ % \(p90 \d+\)", badge)
    for command in ("simulate", "explain", "memory", "whatif"):
        arguments = [command, "llama-3.1-8b-a100", *(FEW if command in ("simulate", "whatif") else ())]
        assert badge in " ".join(" ".join(screen(arguments)).split()), command


def test_memory_reports_no_slots_unless_requested(screen):
    """llama-server starts with four slots that share one KV pool: one sequence may fill it."""
    arguments = ["memory", "--model", "qwen3-32b", "--hardware", "rtx-4090", "--set", "engine.profile=llamacpp"]
    text = "\n".join(screen([*arguments, "--set", "engine.quantization=q4_k_m"]))
    assert re.search(r"It fits: 1 slot of 16,\d{3} tokens\.", text)
    assert re.search(r"Q4_K_M +[\d.]+ +yes +65 of 65", text)
    assert "slots" not in text
    four = [*arguments, "--set", "engine.quantization=q4_k_m", "--set", "engine.max_num_seqs=4"]
    text = " ".join("\n".join(screen(four)).split())
    assert (
        "4 slots of 4,096 tokens each do not fit. Largest that fits: 3 slots of 4,096 tokens each, or 4 slots" in text
    )


def test_a_model_too_large_for_the_device_names_the_layers_and_type_that_fit():
    """For the requested file type the number of layers that fit, and the largest type that fits entirely."""
    arguments = ["memory", "--model", "llama-3.1-70b", "--hardware", "rtx-4090", "--set", "engine.profile=llamacpp"]
    result = CliRunner().invoke(app, [*arguments, "--set", "engine.quantization=q4_k_m"])
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    layers = re.search(r"(\d+) of 81 layers fit: engine.n_gpu_layers=(\d+) and engine.cpu.", text)
    assert layers, text
    assert layers[1] == layers[2]
    assert "All layers fit with engine.quantization=iq2_xxs." in text
    some = [f"--set=engine.n_gpu_layers={layers[1]}", "--set=engine.cpu=ryzen-9-7950x"]
    again = CliRunner().invoke(app, [*arguments, "--set", "engine.quantization=q4_k_m", *some])
    assert again.exit_code == 0, again.output


def test_short_operators_are_one_row_together(screen):
    """Their sums stand where they stood: the rows' milliseconds add up to the step's."""
    rows = [line.split() for line in screen(COMMANDS["a step of many operators"])]
    first, last = (next(at for at, row in enumerate(rows) if row[:1] == [name]) for name in ("operator", "step"))
    table = rows[first : last + 1]
    times = [float(row[row.index(cell) - 1]) for row in table for cell in row if cell[-1] == "%" != cell]
    assert any(row[1:2] == ["others"] for row in table)
    assert sum(times) == pytest.approx(float(table[-1][3]), rel=0.01)
