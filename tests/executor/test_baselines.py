"""Library calls that kernels are compared with: each way that the library has, and how it was timed."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from perfmodel.evidence.sources.measured import KernelRecord  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.gpu_suite.kernels import measure_problem  # noqa: E402
from perfmodel_executors.gpu_suite.task import Bench  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.kv_pages import (  # noqa: E402
    FP8,
    Chunks,
    dequantized,
    random_pages,
)
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402
from perfmodel_executors.measure import device_timer  # noqa: E402

CPU = Bench(torch.device("cpu"), load_hardware("cpu"), "torch")


def plain(operator):
    return next(p for p in problems_of(operator, "tiny", torch.float32) if p.baselines)


@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_every_backend_of_sdpa_is_asked_alone(operator, monkeypatch):
    """What it chooses by itself is not among them: nobody would know what that was."""
    problem, allowed = problems_of(operator)[0], []
    assert set(problem.baselines) == {"sdpa cudnn", "sdpa efficient", "sdpa flash"}
    monkeypatch.setattr(
        "perfmodel_executors.kernels.problem.sdpa_kernel", lambda one: allowed.append(one) or sdpa_kernel(one)
    )
    for call in problem.baselines.values():
        with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError)):
            call()  # no arguments: the backend is chosen before they are looked at
    assert allowed == [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
    ]


def test_what_a_backend_computes_is_what_the_kernel_does():
    """Two sequences of 32 tokens in shuffled pages of 16."""
    inputs = Inputs("cpu", 3)
    pages = random_pages(inputs, 5, 16, 2, (16, 16), torch.float32, torch.float32)
    tables, lengths = torch.tensor([[3, 1], [0, 4]]), torch.tensor([32, 32])
    decode = (inputs.normal(2, 4, 16, dtype=torch.float32), pages, tables, lengths)
    chunks = Chunks(tables, torch.tensor([0, 32, 64]), 0 * lengths)
    prompts = (inputs.normal(64, 4, 16, dtype=torch.float32), pages, chunks)
    for operator, args in (("attention_decode", decode), ("attention_prefill", prompts)):
        ours = getattr(load_kernels(), operator)(*args)
        theirs = problems_of(operator)[0].baselines["sdpa flash"](*args)
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


def test_a_record_has_each_library_call_and_compares_with_the_fastest():
    record = KernelRecord(**measure_problem(plain("rms_norm"), CPU))
    assert set(record.baselines) == {"torch rms_norm"}
    assert record.baseline_s == min(each.seconds for each in record.baselines.values())
    assert not record.is_eager  # a CPU has no graphs that it could have missed


@pytest.mark.parametrize("waits", [False, True])
def test_calls_that_no_graph_holds_are_said_to_be_timed_eagerly(monkeypatch, waits):
    monkeypatch.setattr(device_timer, "_elapsed_s", lambda call: 1e-3)
    monkeypatch.setattr(device_timer, "_captured", lambda calls, count: None if waits else lambda: None)
    assert device_timer.time_calls([lambda: None], torch.device("cuda")).is_eager is waits


def test_pages_of_e4m3_are_gathered_as_bytes(monkeypatch):
    """Not every CUDA build of torch has index_select of float8."""
    pages = torch.randn(6, 4, 2, 8).to(FP8)
    blocks = torch.tensor([4, 1, 1])
    expected = pages.float()[blocks].flatten(0, 1)
    plain_select = torch.Tensor.index_select

    def select(self, dim, index):
        if self.dtype == FP8:
            raise NotImplementedError('"index_select_cuda" not implemented for Float8_e4m3fn')
        return plain_select(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", select)
    assert torch.equal(dequantized(pages, None, blocks, torch.float32), expected)
