"""Every Triton kernel against its reference, on problems of odd sizes. bf16 is silently wrong in the interpreter."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels import KERNELS, load_kernels  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402

PROBLEMS = [
    pytest.param(problem, id=str(problem))
    for operator, backends in KERNELS.items()
    if "triton" in backends
    for dtype in (torch.float32, torch.float16)
    for problem in problems_of(operator, "tiny", dtype)
]


def _tensors(value):
    """All tensors in a nest of tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_kernel_computes_what_its_reference_does(problem):
    """Results, and what is written into the arguments (pages of a KV cache)."""
    ours, theirs = problem.make(Inputs("cpu", seed=1)), problem.make(Inputs("cpu", seed=1))
    actual = getattr(load_kernels("triton"), problem.operator)(*ours)
    expected = getattr(load_kernels("torch"), problem.operator)(*theirs)
    pairs = list(zip(_tensors((actual, ours)), _tensors((expected, theirs)), strict=True))
    assert pairs
    for left, right in pairs:
        assert left.shape == right.shape
        assert left.dtype == right.dtype
        scale = max(1.0, float(right.double().nan_to_num().abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(
            left.double(), right.double(), rtol=0, atol=problem.tolerance * scale, equal_nan=True
        )


def test_every_triton_kernel_has_problems_in_both_dtypes():
    operators = {operator for operator, backends in KERNELS.items() if "triton" in backends}
    assert operators == {param.values[0].operator for param in PROBLEMS}
