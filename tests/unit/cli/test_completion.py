"""What a shell is told to complete: commands, flags, and the names of scenarios, models, devices and traffic."""

import json
import os
import subprocess
import sys

import pytest

from perfmodel.specs import list_hardware, list_models, list_names

ASK = """
import json, sys
from perfmodel.cli import main
try:
    main()
except SystemExit:
    pass
print()
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = {
    "numpy",
    "plotly",
    "rich.table",
    "scipy",
    "torch",
    "yaml",
    "perfmodel.specs",
    "perfmodel.sim",
    "perfmodel.planning",
}


def completed(line):
    """What bash is told for the last word of `line`, and the modules that were loaded for it."""
    words = line.split(" ")
    asked = {"_PERFMODEL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([sys.executable, "-c", ASK], env={**os.environ, **asked}, capture_output=True, text=True)
    *found, modules = done.stdout.split("\n")[:-1]
    return [each for each in found if each], set(json.loads(modules))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("perfmodel sim", ["simulate"]),
        ("perfmodel simulate --tp", ["--tp", "--tpot"]),
        ("perfmodel hardware ", ["list", "show", "new", "detect"]),
        ("perfmodel simulate llama-3.1-8b", [n for n in list_names("scenarios") if n.startswith("llama-3.1-8b")]),
        ("perfmodel plan --model qwen3", [n for n in list_models() if n.startswith("qwen3")]),
        ("perfmodel plan --hardware h100-sxm-80gb,h200-s", ["h100-sxm-80gb,h200-sxm"]),
        ("perfmodel plan --traffic azure", ["azure-code", "azure-conversation"]),
        ("perfmodel hardware show b", [n for n in list_hardware() if n.startswith("b")]),
        ("perfmodel study nod", ["nodes"]),
    ],
)
def test_what_is_completed(line, wanted):
    found, modules = completed(line)
    assert found == wanted
    assert found
    assert modules & HEAVY == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell):
    """Typer asks the terminal which shell it is, or is told where nobody can say."""
    code = (
        "import sys; from perfmodel.cli import main; sys.argv = ['perfmodel', '--show-completion', sys.argv[1]]; main()"
    )
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([sys.executable, "-c", code, shell], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "_PERFMODEL_COMPLETE" in done.stdout
