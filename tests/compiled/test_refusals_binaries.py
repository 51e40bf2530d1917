"""What cannot be compiled ahead of time is one sentence."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
triton = pytest.importorskip("triton", reason="Triton kernels need triton")
tl = pytest.importorskip("triton.language")

from perfmodel.errors import SpecError  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled.build import compile_launch, compile_problem  # noqa: E402
from perfmodel_executors.kernels.launch import KernelError, launch, recording  # noqa: E402
from perfmodel_executors.kernels.problem import problems_of  # noqa: E402


@triton.jit
def _broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 16, "blocks of 16 and more are wrong")
    tl.store(x_ptr, BLOCK)


def broken():
    with recording() as launches:
        launch(_broken_kernel, (1,), torch.zeros(1, device="meta"), BLOCK=16)
    return launches[0]


def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(KernelError, match=r"broken_kernel does not compile for h100-sxm-80gb with BLOCK=16: .* wrong"):
        compile_launch(broken(), load_hardware("h100-sxm-80gb"))


def test_a_failing_pass_is_a_sentence_too(monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton, "compile", fails)
    with pytest.raises(KernelError, match=r"PassManager::run failed; use the torch kernels"):
        compile_launch(broken(), load_hardware("h100-sxm-80gb"))


def test_gpus_before_ampere_are_refused_before_anything_is_compiled():
    with pytest.raises(SpecError, match=r"t4 is sm_75, and Triton kernels need sm_80 or newer"):
        compile_problem(problems_of("rms_norm")[0], load_hardware("t4"))
