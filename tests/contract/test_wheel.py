"""The wheel, alone: built, installed into a clean environment outside the checkout, and run there."""

import email
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
MAX_WHEEL_BYTES, MAX_WHEEL_FILES = 3_130_000, 1_115
pytestmark = [
    pytest.mark.release,
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


def built(kind, source, folder):
    """What the tree `source` is built to; kind: wheel or sdist."""
    call(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (found,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return built("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


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
    outside += ("perfmodel/_data/workloads/scenarios/published/", "hardware_specs/", "workloads/", "reports/")
    assert not [name for name in names if name.startswith(outside)]


def test_the_wheel_is_small(wheel):
    """Half of it is code; each file costs some 250 bytes beside its content: headers, and its line in RECORD."""
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES
    assert len(zipfile.ZipFile(wheel).namelist()) <= MAX_WHEEL_FILES


def test_measurements_are_in_no_distribution(sdist):
    """Megabytes of other people's figures, under their licences, that no prediction reads."""
    with tarfile.open(sdist) as archive:
        parts = [Path(name).parts for name in archive.getnames()]
    assert ("perfmodel", "__init__.py") in [names[1:] for names in parts]
    assert not [names for names in parts if names[1:2] == ("measurements",)]


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_source_distribution_builds_the_same_wheel(wheel, sdist, tmp_path):
    """To the last byte, version included, although it has neither tags nor .git."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert not (source / ".git").exists()
    (tmp_path / "again").mkdir()
    again = built("wheel", source, tmp_path / "again")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_metadata_is_complete_and_invents_nothing(wheel):
    files = contents(wheel)
    (folder,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    said = email.message_from_bytes(files[f"{folder}/METADATA"])
    assert folder == f"perfmodel-{said['Version']}.dist-info"
    assert {"Name", "Summary", "Author", "Keywords", "License-Expression", "Requires-Python"} <= set(said.keys())
    assert said["Description-Content-Type"] == "text/markdown"
    supported = {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)}
    assert supported | {"Typing :: Typed", "Operating System :: OS Independent"} <= set(said.get_all("Classifier"))
    assert not [each for each in said.get_all("Classifier") if each.startswith("License ::")]  # PEP 639: an expression
    # Nobody has said yet where the repository will be.
    assert not {"Project-URL", "Home-page", "Author-email"} & set(said.keys())
    for name in said.get_all("License-File"):
        assert files[f"{folder}/licenses/{name}"] == (ROOT / name).read_bytes()
    assert {"LICENSE", "LICENSES/MIT.txt", "LICENSES/0BSD.txt", "THIRD_PARTY.md"} <= set(said.get_all("License-File"))


def test_an_index_would_take_it(wheel, sdist):
    """As `make dist` checks it."""
    pytest.importorskip("twine", reason="the extra `publish` is not installed: `make dist` installs it")
    pytest.importorskip("check_wheel_contents", reason="the extra `publish` is not installed: `make dist` installs it")
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=ROOT)
    call(sys.executable, "-m", "check_wheel_contents", wheel, cwd=ROOT)


def test_the_command_says_what_was_built(python, wheel, tmp_path):
    version = call(python, "-c", "import perfmodel; print(perfmodel.__version__)", cwd=tmp_path).strip()
    assert wheel.name == f"perfmodel-{version}-py3-none-any.whl"
    assert call(python.parent / "perfmodel", "--version", cwd=tmp_path).strip() == f"perfmodel {version}"
    release = call(python, "-c", "from perfmodel.version import RELEASE as r; print(r)", cwd=tmp_path).strip()
    assert (version == release) or version.startswith(f"{release}.dev")


def test_demo_runs_from_the_wheel_alone(python, tmp_path):
    script = python.parent / "perfmodel"
    answer = json.loads(
        call(script, "simulate", "llama-3.1-8b-a100", "--json", "--out", tmp_path / "demo", cwd=tmp_path)
    )
    assert answer["completed"] == 1000
    report = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert report.count("<svg") >= 5
    assert len(report) < 1e6


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
