"""A matrix multiplication by hand: its operands, and the bias beside them."""

import pytest

from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm

FORMATS = [
    LinearFormat("bf16", 2.0, 2.0, 2.0),
    LinearFormat("fp8", 1.0, 1.0, 2.0, True),
    LinearFormat("bf16", 0.5, 2.0, 2.0, name="int4_wo"),
    LinearFormat("fp32", 4.0, 4.0, 4.0),
]


@pytest.mark.parametrize("form", FORMATS)
def test_a_bias_is_a_row_of_outputs_read_once(form: LinearFormat) -> None:
    """n numbers of the output's format, whatever the weights': nobody quantizes a bias. An addition is no FLOP here."""
    plain, biased = (gemm("x", 7, 48, 32, form, has_bias=has) for has in (False, True))
    assert biased.weight_bytes - plain.weight_bytes == 48 * form.output_bytes
    assert (biased.activation_bytes, biased.flops) == (plain.activation_bytes, plain.flops)


def test_every_operand_moves_once() -> None:
    """7 x 32 inputs times 32 x 48 weights. In fp8 an input of 2 bytes is first read and written as 1 by a kernel of its
    own, then read."""
    bf16, fp8, int4, _ = (gemm("x", 7, 48, 32, form) for form in FORMATS)
    assert (bf16.flops, bf16.num_kernels) == (2 * 7 * 48 * 32, 1)
    assert (bf16.weight_bytes, bf16.activation_bytes) == (48 * 32 * 2, 7 * 32 * 2 + 7 * 48 * 2)
    assert (fp8.weight_bytes, fp8.activation_bytes) == (48 * 32, 7 * 32 * (2 + 1) + 7 * 32 + 7 * 48 * 2)
    assert (fp8.num_kernels, int4.weight_bytes) == (2, 48 * 32 / 2)
