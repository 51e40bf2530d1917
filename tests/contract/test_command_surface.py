"""The commands and flags that people and tools outside the repository call: a change here is a breaking change."""

import typer

from perfmodel.cli import app

LIMITS = [
    *("--ttft", "--ttft-mean", "--ttft-p50", "--ttft-p90", "--ttft-p95", "--ttft-p99"),
    *("--tpot", "--tpot-mean", "--tpot-p50", "--tpot-p90", "--tpot-p95", "--tpot-p99"),
    *("--itl-mean", "--itl-p50", "--itl-p90", "--itl-p95", "--itl-p99"),
    *("--e2e", "--e2e-mean", "--e2e-p50", "--e2e-p90", "--e2e-p95", "--e2e-p99"),
]
WITHOUT_A_FILE = ["--model", "--hardware", "--rate", *LIMITS, "--traffic"]
WITHOUT_LIMITS = ["--model", "--hardware", "--rate", "--traffic"]
PARALLELISM = ["--tp", "--pp", "--dp", "--ep"]
STEP_FORMS = [*PARALLELISM, "--input", "--output"]
SHORT_FORMS = [*STEP_FORMS, "--price"]
FROZEN = {
    "calibrate": [
        "[FILE...]",
        "--device",
        "--model",
        "--from",
        "--engine",
        "--routing",
        "--whole-runs",
        "--exchange",
        "--overheads",
        "--kernel-errors",
        "--power",
        "--prior",
        "--softmax",
        "--acceptance",
        "--rows",
        *("--on", "--name", "--suggest", "--scenario", "--hardware", "--set", "--to", "--force"),
        "--out",
        "--json",
    ],
    "compare": ["A", "B", "--json"],
    "execute": [
        *("SCENARIO", "--set", "--json", "--out", "--seed", "--kernels", "--on", "--max-seconds", "--print-text"),
        *("--details", *SHORT_FORMS),
    ],
    "explain": [
        *("SCENARIO", "--set", "--batch", "--context", "--prefill", "--run", "--occupancy", "--json", "--seed"),
        "--details",
        *WITHOUT_LIMITS,
        *STEP_FORMS,
    ],
    "hardware detect": ["--cpu", "--seconds"],
    "hardware list": ["--kind", "--maker", "--name", "--json"],
    "hardware new": ["NAME", "--like"],
    "hardware show": ["NAME", "--json"],
    "memory": ["SCENARIO", "--set", "--json", "--model", "--hardware", *PARALLELISM],
    "models list": ["--json"],
    "models show": ["NAME", "--json"],
    "new": ["LINE", "--strict", *WITHOUT_A_FILE],
    "plan": [
        "SCENARIO",
        "--set",
        "--json",
        "--report",
        "--export",
        "--store",
        "--engine",
        "--details",
        *WITHOUT_A_FILE,
        *SHORT_FORMS,
    ],
    "quality": [
        *("SCENARIO", "--set", "--against", "--text", "--chunk", "--sensitivity", "--group-size", "--bits", "--blocks"),
        *("--out", "--json", "--seed"),
    ],
    "roofline": [
        "SCENARIO",
        "--set",
        "--batch",
        "--context",
        "--prefill",
        "--out",
        "--json",
        *WITHOUT_LIMITS,
        *STEP_FORMS,
    ],
    "scenarios list": ["--all", "--json"],
    "scenarios new": WITHOUT_A_FILE,
    "scenarios show": ["NAME", "--json"],
    "schema": ["KIND"],
    "prices": ["--stale", "--json"],
    "watch": [
        *("SCENARIO", "--set", "--url", "--every", "--minutes", "--longest", "--fail-on", "--port"),
        *("--model", "--hardware", *PARALLELISM),
    ],
    "web": ["--host", "--port", "--open", "--export", "--view"],
    "serve": [
        *("SCENARIO", "--host", "--port", "--ports", "--speed", "--served-model-name", "--tokenizer", "--answers"),
        *(
            "--api-key",
            "--allowed-host",
            "--lora",
            "--metrics-names",
            "--kv-events",
            *("--kv-replay", "--kv-topic", "--kv-arrays"),
            "--cold-start",
            "--fail",
            "--drain",
        ),
        *("--set", "--seed", "--model", "--hardware", *PARALLELISM),
    ],
    "simulate": ["SCENARIO", "--set", "--json", "--out", "--seed", "--details", *WITHOUT_A_FILE, *SHORT_FORMS],
    "study": ["STUDY", "--execute", "--quality", "--quick", "--set", "--json", "--report", "--engine"],
    "techniques": ["--family", "--json"],
    "validate": [
        *(
            "KIND",
            "PATH...",
            "--scenario",
            "--measured",
            "--set",
            "--speed",
            "--repeat",
            "--leave-out",
            "--full",
            "--json",
            "--seed",
        ),
        *("--report", "--details"),
        *("--model", "--hardware", "--traffic"),
    ],
    "whatif": [
        "SCENARIO",
        "--vary",
        "--metric",
        "--grid",
        "--against",
        "--intervals",
        "--speculation",
        "--set",
        "--json",
        "--report",
        "--engine",
        "--details",
        *WITHOUT_A_FILE,
        *SHORT_FORMS,
    ],
}


def surface(command, prefix=""):
    if hasattr(command, "commands"):
        found = {}
        for name, sub in command.commands.items():
            found |= surface(sub, f"{prefix} {name}".strip())
        return found
    names = []
    for parameter in command.params:
        longest = max(parameter.opts, key=len)
        names.append(longest if longest.startswith("-") else parameter.metavar)
    return {prefix: [name for name in names if name != "--help"]}


def test_commands_and_flags_are_frozen():
    found = surface(typer.main.get_command(app))
    assert {name: sorted(flags) for name, flags in found.items()} == {n: sorted(f) for n, f in FROZEN.items()}
