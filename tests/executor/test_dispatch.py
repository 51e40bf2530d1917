"""Which kernels cannot be had, as one sentence with the way out; the command exits with status 2."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from typer.testing import CliRunner  # noqa: E402

from perfmodel.cli import app  # noqa: E402
from perfmodel.errors import MissingExtraError, SpecError  # noqa: E402
from perfmodel_executors import device as devices  # noqa: E402
from perfmodel_executors.kernels import dispatch, load_kernels  # noqa: E402
from perfmodel_executors.kernels.dispatch import Kernels, check_interpreter  # noqa: E402


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """What `perfmodel execute` with these arguments says on its last line, once it has refused."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = CliRunner().invoke(app, ["execute", "tiny-llama-cpu", *arguments])
        assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
        lines = [line for line in result.stderr.splitlines() if "error:" in line]
        assert len(lines) == 1
        return lines[0]

    return run


@pytest.fixture
def a_t4(monkeypatch):
    """Says that the GPU here is a T4."""
    monkeypatch.setattr(devices, "_present_gpus", lambda: ["Tesla T4"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))


def test_without_triton_its_kernels_are_refused(monkeypatch, execute):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"triton, which is not installed: pip install .*--kernels torch"):
        load_kernels("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the kernels would run on the CPU then
    assert "--kernels torch" in execute("--kernels", "triton")
    load_kernels("torch")


@pytest.mark.parametrize(
    ("triton", "numpy", "works"), [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.4.6", True)]
)
def test_versions_that_do_not_interpret_are_refused_in_a_sentence(monkeypatch, triton, numpy, works):
    """Triton 3.6 calls int() on arrays of one element; NumPy 2.4 raises TypeError for it in the middle of a kernel."""
    if works:
        check_interpreter(triton, numpy)
        return
    pytest.importorskip("triton", reason="Triton kernels need triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # refused before any kernel is imported, which would stay interpreted
    monkeypatch.setattr(dispatch, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    with pytest.raises(MissingExtraError, match=r"triton 3.6.0 does not interpret .*numpy<2.4"):
        load_kernels("triton")


def test_gpus_before_ampere_are_refused(a_t4, execute):
    with pytest.raises(SpecError, match=r"Tesla T4 is sm_75, and Triton kernels need sm_80 or newer.*--kernels torch"):
        load_kernels("triton", torch.device("cuda"))
    assert "Tesla T4 is sm_75" in execute("--set", "hardware=t4", "--set", "engine.dtype=float16")
    load_kernels("torch", torch.device("cuda"))


def test_operators_that_ran_in_torch_are_kept():
    """Only those that were called, of those that the chosen backend lacks."""
    kernels = Kernels({"one": lambda x: x + 1, "two": lambda x, by=2: x * by, "three": abs}, missing=["two", "three"])
    assert (kernels.one(3), kernels.two(3, by=4)) == (4, 12)
    assert kernels.substituted == {"two"}


def test_an_unknown_backend_is_refused(execute):
    assert "known backends: torch, triton" in execute("--kernels", "cuda")
