"""On a terminal of 80 columns: every command's tables whole, nothing cut, nothing broken, no line too long."""

from pathlib import Path

import pytest
from narrow_terminal import faults_on
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.cli.terminal import show_text
from perfmodel.cost.calibrations.files import load_calibration
from perfmodel.planning.typical_step import estimate_choice
from perfmodel.report import terminal
from perfmodel.report.views.step import occupancy_view
from perfmodel.report.views.validation import calibration_view
from perfmodel.specs import load_hardware, load_scenario

ROOT = Path(__file__).parents[3]
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
    "what if, in a grid": [
        *("whatif", "llama-3.1-8b-a100", *FEW, "--grid", "--metric", "output_throughput"),
        *("--vary", "engine.max_num_seqs=16,64,256,512", "--vary", "traffic.arrivals.rate=1,2,4,8,16"),
    ],
    "which device": ["whatif", "llama-3.1-8b-a100", *FEW, "--vary", "hardware=h100-sxm-80gb,a100-sxm-80gb"],
    "scenarios": ["scenarios", "list", "--all"],
    "a network": ["hardware", "show", "infiniband-ndr"],
    "techniques": ["techniques"],
    "techniques of a family": ["techniques", "--family", "serving"],
    "published figures": ["validate", "published", f"{ROOT}/workloads/scenarios/published/aic_attn-010.yaml"],
    "a fleet": ["simulate", "llama-3.1-8b-h100-fleet", *FEW],
    "flags": ["simulate", "--model", "llama-3.1-8b", "--hardware", "h100", *FEW],
    "study": ["study", "kv_caching", "--quick"],
    "plan": [
        *("plan", "llama-3.1-8b-a100", *FEW, "--set", "plan.finalists=2", "--set", "plan.seeds=1"),
        *("--set", "plan.space.hardware=[a100-sxm-80gb, h100-sxm-80gb]"),
    ],
    "offline plan": ["plan", "summaries-8b-offline", "--set", "plan.finalists=2", "--set", "plan.seeds=1"],
}


@pytest.mark.release
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_every_table_is_whole_on_eighty_columns(arguments, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(terminal, "show_document", lambda document, console: shown.append(document))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = CliRunner().invoke(app, arguments)
    assert shown, found.output
    for document in shown:
        assert faults_on(document, 80) == set()


def test_kernels_of_a_step_and_fits_are_whole_on_eighty_columns():
    """What `explain --occupancy` and `calibrate` show, of kernels with long names and large numbers."""
    row = {
        "kernel": "paged_attention_decode_split", "tile": "BLOCK_M=128 BLOCK_N=128 BLOCK_K=64 SPLITS=16", "count": 1024,
        "blocks": 131072, "waves": 1234.5, "warps": 8, "registers": 255, "shared_bytes": 227 * 1024, "spills": 1024,
        "tensor_instructions": 4096, "blocks_per_unit": 16, "occupancy": 1.0, "limited_by": "shared memory",
    }  # fmt: skip
    report = estimate_choice(load_scenario("llama-3.1-8b-a100"))
    assert faults_on(occupancy_view(report, [row, row]), 80) == set()
    assert faults_on(calibration_view(load_calibration(load_hardware("h100-sxm-80gb"), "vllm")), 80) == set()


def test_plain_text_is_wrapped_between_words_on_a_terminal(capsys):
    """As `quality` prints it; piped, a line stays a line."""
    text = "perplexity 13.59\n" + " ".join(["word"] * 40)
    show_text(text, 80)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    show_text(text, None)
    assert capsys.readouterr().out == text + "\n"
