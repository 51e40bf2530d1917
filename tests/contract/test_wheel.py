"""The wheel, alone: built, installed into a clean environment outside the checkout, and run there."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wheel"),
    pytest.mark.skipif(
        any(ROOT.glob("perfmodel/engine/*.so")),
        reason="compiled modules lie beside the sources: `make compiled` has built this tree's wheel",
    ),
]


def call(*args, cwd):
    """Without the checkout on any path, and without the caller's environment telling Python where to look."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(a) for a in args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """A fresh environment with the wheel. Its dependencies are borrowed from the environment of the tests: a path file
    names its site-packages, whose own path files (an editable install of the checkout) are not followed from there.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    call(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    import numpy

    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    return python


def test_data_files_are_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for wanted in (
        "perfmodel/_data/hardware_specs/a100-sxm-80gb.yaml",
        "perfmodel/_data/hardware_specs/engines/vllm.yaml",
        "perfmodel/_data/workloads/models/llama-3.1-8b.yaml",
        "perfmodel/_data/workloads/scenarios/llama-3.1-8b-a100.yaml",
        "perfmodel/py.typed",
        "perfmodel_executors/py.typed",
    ):
        assert wanted in names
    outside = ("tests/", "docs/", "benchmarks/", "executors/", "measurements/", "perfmodel/_data/measurements/")
    assert not [name for name in names if name.startswith(outside)]


def test_measurements_are_in_no_distribution(tmp_path):
    """Megabytes of other people's figures, under their licences, that no prediction reads."""
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        parts = [Path(name).parts for name in archive.getnames()]
    assert ("perfmodel", "__init__.py") in [names[1:] for names in parts]
    assert not [names for names in parts if names[1:2] == ("measurements",)]


def test_demo_runs_from_the_wheel_alone(python, tmp_path):
    script = python.parent / "perfmodel"
    answer = json.loads(
        call(script, "simulate", "llama-3.1-8b-a100", "--json", "--out", tmp_path / "demo", cwd=tmp_path)
    )
    assert answer["completed"] == 1000
    assert (tmp_path / "demo" / "report.html").stat().st_size > 4e6


def test_nothing_is_read_from_the_checkout(python, tmp_path):
    """Every file opened and every module loaded while the demo runs, by Python's own audit events."""
    watch = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from perfmodel.cli import main
sys.argv = ["perfmodel", "simulate", "llama-3.1-8b-a100", "--set", "traffic.num_requests=20", "--out", "demo"]
try:
    main()
except SystemExit as end:
    assert not end.code
files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
print(json.dumps({"opened": opened, "modules": files, "torch": "torch" in sys.modules}))
"""
    seen = json.loads(call(python, "-c", watch, cwd=tmp_path).splitlines()[-1])
    inside = [str(ROOT / folder) for folder in ("perfmodel", "executors", "hardware_specs", "workloads")]
    assert not [path for path in seen["opened"] + seen["modules"] if path.startswith(tuple(inside))]
    assert any("_data/workloads/models/llama-3.1-8b.yaml" in path for path in seen["opened"])
    assert not seen["torch"]
