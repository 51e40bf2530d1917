"""What is not needed is not loaded: no torch in the core, nothing heavy for `--help`."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "scipy.optimize", "scipy.stats", "pandas", "perfmodel_executors")
NOT_FOR_HELP = (*HEAVY, "numpy", "scipy", "plotly", "simpy", "pydantic", "yaml")

MAX_MODULES = 210  # of this package
LOADED = "import sys, json; print(); print(json.dumps(sorted(sys.modules)))"
RUN_CLI = f"""
from perfmodel.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
{LOADED}
"""
# CPU seconds of a fresh interpreter, as the operating system counts them for a child.
CPU_OF = """
import resource, subprocess, sys
def cpu(args):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
pairs = [(cpu(["-m", "perfmodel", "--help"]), cpu(["-c", "import numpy"])) for _ in range(7)]
print(sorted(a / b for a, b in pairs)[3])
"""


@pytest.fixture
def loaded(run_python):
    """The modules that a fresh interpreter has loaded when the code is done: the last line of its stdout."""
    return lambda code, *args: set(json.loads(run_python(code, *args).splitlines()[-1]))


def test_import_perfmodel_loads_nothing_heavy(loaded):
    names = loaded(f"import perfmodel; {LOADED}")
    assert names.isdisjoint(NOT_FOR_HELP)


def test_help_loads_nothing_heavy(loaded):
    names = loaded(RUN_CLI, "--help")
    assert names.isdisjoint(NOT_FOR_HELP)


# What a simulation of one pool that stays as it is has no use for: other rooms, and what other clusters have.
NOT_FOR_A_PLAIN_SIMULATION = (
    "numpy.ma",
    "perfmodel.api",
    "perfmodel.evidence",
    "perfmodel.commands.searches",
    "perfmodel.models.changes",
    "perfmodel.models.weights.headers",
    "perfmodel.planning",
    "perfmodel.report",
    "perfmodel.sim.fleet.disaggregated",
    "perfmodel.sim.fleet.dynamic",
    "perfmodel.sim.fleet.gateway",
    "perfmodel.sim.fleet.kv_transfer",
    "perfmodel.sim.records.whole_runs",
    "rich",
)


def test_a_plain_simulation_loads_no_other_room(loaded):
    names = loaded(RUN_CLI, "simulate", "llama-3.1-8b-a100", "--json", "--set", "traffic.num_requests=5")
    assert names.isdisjoint(NOT_FOR_A_PLAIN_SIMULATION)


PARSED = f"""
import sys, json
from pathlib import Path
from perfmodel.files import yaml_loader
parsed, load = [], yaml_loader.load_yaml_text
yaml_loader.load_yaml_text = lambda text, name: parsed.append(Path(name).stem) or load(text, name)
{RUN_CLI.replace(LOADED, "print(); print(json.dumps(parsed))")}
"""


def test_a_simulation_parses_no_calibration_that_adds_nothing(loaded):
    """Of a device with a calibration of its own: that, and the first relation that has each kind of kernel it lacks.
    Of 15 related files three have one; the others would be 60 ms of YAML."""
    names = loaded(PARSED, "simulate", "llama-3.1-8b-a100", "--json", "--set", "traffic.num_requests=5")
    kernels = {name for name in names if "@" in name and not name.startswith("engine@")}
    assert kernels == {"a100-sxm-80gb@vllm", "h100-sxm-80gb@vllm", "h100-sxm-80gb@sglang", "rtx-4090@vllm"}


def test_a_plain_simulation_loads_few_modules(loaded):
    """A module costs half a millisecond to a few: most are classes to be made."""
    names = loaded(RUN_CLI, "simulate", "llama-3.1-8b-a100", "--set", "traffic.num_requests=5")
    assert len([name for name in names if name.split(".")[0] == "perfmodel"]) <= MAX_MODULES


def test_specs_build_their_validators_when_they_are_first_read(run_python):
    """Building takes a millisecond or two for each of some hundred specs, of which a run reads a third."""
    code = "from perfmodel.planning.spec import PlanSpec; print(PlanSpec.__pydantic_complete__)"
    assert run_python(code).split() == ["False"]


@pytest.mark.parametrize("command", ["simulate", "explain", "memory"])
def test_commands_of_the_core_load_no_torch(loaded, command):
    extra = ["--set", "traffic.num_requests=5"] if command == "simulate" else []
    names = loaded(RUN_CLI, command, "llama-3.1-8b-a100", "--json", *extra)
    assert names.isdisjoint(HEAVY)
    assert "plotly" not in names


def test_help_takes_no_more_than_a_few_numpy_imports(run_python):
    """Relative, since machines differ: 1.2 measured on an idle machine; a careless import makes it 5 or more."""
    assert float(run_python(CPU_OF)) < 3.0


def test_names_of_the_package_are_all_there(run_python):
    code = "import perfmodel; [getattr(perfmodel, name) for name in perfmodel.__all__]; print(len(dir(perfmodel)))"
    assert int(run_python(code)) > 10


def test_unknown_names_are_attribute_errors(run_python):
    assert run_python("import perfmodel; print(hasattr(perfmodel, 'nothing'))").strip() == "False"


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "perfmodel", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("perfmodel ")


def test_a_memory_plan_loads_neither_the_simulator_nor_what_was_measured(loaded):
    names = loaded(RUN_CLI, "memory", "llama-3.1-8b-a100")
    assert names.isdisjoint({"perfmodel.sim", "perfmodel.engine", "perfmodel.evidence"})
