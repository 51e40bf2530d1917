"""Norms and writes of the cache by hand: what one kernel moves, and what the operators of an expression do."""

import pytest

from perfmodel.ops.elementwise import kv_concat, kv_write, rms_norm

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


@pytest.mark.parametrize(("is_fused", "name", "kernels"), [(True, "kv_write", 1), (False, "kv_write_unfused", 2)])
def test_new_keys_and_values_are_read_once_and_written_once(is_fused: bool, name: str, kernels: int) -> None:
    """7 tokens of 64 elements in bf16, into a cache of fp8."""
    work = kv_write(7, 64, 2.0, 1.0, is_fused=is_fused)
    assert (work.name, work.family, work.num_kernels) == (name, "elementwise", kernels)
    assert (work.activation_bytes, work.kv_bytes) == (7 * 64 * 2, 7 * 64 * 1)


def test_a_cache_that_is_concatenated_is_read_and_written_anew() -> None:
    """Two caches of 1,000 bytes after the step, of which 3 elements of 2 bytes each are new: those are read from the
    projection's output, the rest from the cache of the step before; all are written, keys and values apart."""
    work = kv_concat("kv_concat", 2, 1000.0, 3.0, (4.0, 2.0))
    assert (work.name, work.family, work.num_kernels) == ("kv_concat", "elementwise", 4)
    assert (work.kv_bytes, work.activation_bytes) == ((1000 - 3 * 2) + 1000, 3 * 4)
