"""A kernel that does not compile is one sentence wherever it is launched from; a bug in one is not."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from perfmodel.cli import app  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.launch import KernelError, launch  # noqa: E402
from perfmodel_executors.kernels.triton import rms_norm  # noqa: E402

FAILURES = [
    CompilationError("x = y", None, "y is not defined"),
    PTXASError("ptxas fatal: out of registers"),
    OutOfResources(300_000, 232_448, "shared memory"),
    RuntimeError("PassManager::run failed"),
]


class Broken:
    """A kernel whose launch fails."""

    __name__ = "_broken_kernel"

    def __init__(self, error):
        self.error = error

    def __getitem__(self, grid):
        def run(*args, **options):
            raise self.error

        return run


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_kernel_that_does_not_compile_is_one_sentence(error):
    with pytest.raises(KernelError, match=r"broken_kernel does not compile for cpu with BLOCK=16: .*--kernels torch"):
        launch(Broken(error), (1,), torch.zeros(1), BLOCK=16)


@pytest.mark.parametrize("error", [TypeError("no"), InterpreterError("no"), RuntimeError("CUDA: illegal access")])
def test_other_errors_pass(error):
    with pytest.raises(type(error), match=r"no|illegal"):
        launch(Broken(error), (1,), torch.zeros(1))


def test_the_command_prints_the_sentence_and_exits_with_2(monkeypatch, tmp_path):
    load_kernels("triton")
    monkeypatch.setattr(rms_norm, "_rms_norm_kernel", Broken(FAILURES[0]))
    monkeypatch.chdir(tmp_path)
    arguments = ["tiny-llama-cpu", "--kernels", "triton", "--set", "engine.dtype=float32"]
    result = CliRunner().invoke(app, ["execute", *arguments])
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert "y is not defined; use the torch kernels (--kernels torch)." in lines[0]
