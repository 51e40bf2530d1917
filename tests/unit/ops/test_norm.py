"""Norms by hand: what one kernel moves, and what the operators of an expression do."""

import pytest

from perfmodel.ops.elementwise import rms_norm

N, D, B = 7, 64, 2.0


def test_a_norm_reads_and_writes_its_rows_once() -> None:
    work = rms_norm("norm", N, D, B)
    assert (work.num_kernels, work.activation_bytes) == (1, 2 * N * D * B)


def test_with_the_residual_stream_four_tensors_move() -> None:
    """x and the residual are read, their sum and its norm written."""
    work = rms_norm("norm", N, D, B, adds_residual=True)
    assert (work.num_kernels, work.activation_bytes) == (1, 4 * N * D * B)


@pytest.mark.parametrize("num_tensors", [1, 2])
def test_as_an_expression_each_operator_moves_its_tensors(num_tensors: int) -> None:
    """LlamaRMSNorm on bf16: to fp32 (read 2, write 4 bytes an element), square (4, 4), mean (4), times the root (4, 4),
    back (4, 2), times the weights (2, 2): 36 bytes; the mean and its root are a number a row."""
    work = rms_norm("norm", N, D, B, is_fused=False, num_tensors=num_tensors)
    assert work.activation_bytes == pytest.approx(N * D * 36, rel=0.05)
    assert work.num_kernels % num_tensors == 0
    assert work.num_kernels >= 6 * num_tensors
