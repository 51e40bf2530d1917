"""Element-wise kernels by hand: bytes of fused kernels, and of the separate operators of an expression."""

import pytest

from perfmodel.ops import Work
from perfmodel.ops.elementwise import (
    activation,
    embedding,
    gate,
    kv_concat,
    kv_write,
    residual_add,
    rms_norm,
    rope,
    sample,
)

N, D, B = 7, 64, 2.0


@pytest.mark.parametrize(
    ("work", "tensors", "kernels"),
    [
        (activation(N, D, B, is_fused=True), 2 + 1, 1),  # silu(g) * u: g and u read, the product written
        (activation(N, D, B, is_fused=False), (1 + 1) + (2 + 1), 2),  # silu(g), then the product
        (activation(N, D, B, function="gelu", is_gated=False, is_fused=True), 1 + 1, 1),
        (activation(N, D, B, function="relu2", is_gated=False, is_fused=False), (1 + 1) + (1 + 1), 2),  # relu, square
        (gate("gate", N, D, B), 2 + 1, 1),
        (gate("gate", N, D, B, is_fused=False), (1 + 1) + (2 + 1), 2),  # sigmoid(g), then the product
        (residual_add("add", N, D, B), 2 + 1, 1),
        (embedding(N, D, B), 1 + 1, 1),  # a row read and written
        (embedding(N, D, B, num_tables=2), 2 + 1, 1),  # a word's row and a position's, their sum
        (rope(N, D, B), 1 + 1, 1),  # in place
        # x cos + rotate_half(x) sin: one half negated, both concatenated, two products, a sum
        (rope(N, D, B, is_fused=False), (0.5 + 0.5) + (1 + 1) + (1 + 1) + (1 + 1) + (2 + 1), 10),
    ],
)
def test_a_kernel_moves_the_tensors_that_it_reads_and_writes(work: Work, tensors: float, kernels: int) -> None:
    assert (work.hbm_bytes, work.num_kernels) == (tensors * N * D * B, kernels)


def test_greedy_sampling_casts_logits_and_takes_the_largest() -> None:
    """2 bytes read and 4 written by the cast to fp32, 4 read by the argmax; methods that sort move more."""
    assert sample(N, 1000).hbm_bytes == N * 1000 * (2 + 4 + 4)
    assert sample(N, 1000).hbm_bytes < sample(N, 1000, "random").hbm_bytes < sample(N, 1000, "top_p").hbm_bytes


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
