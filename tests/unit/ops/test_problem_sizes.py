"""Extents: what operators say of their sizes, what a calibration picks a kernel by, and columns of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import Calibration, OperatorTimer
from perfmodel.cost.kernel_models.attention.decode import FlashDecodeFit
from perfmodel.cost.kernel_models.fits import Domain, joined, take
from perfmodel.cost.kernel_models.gemm import TiledGemmFit
from perfmodel.errors import SpecError
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops import build_graph, decode_shape
from perfmodel.ops.attention.decode import attention_decode, mixed_attention
from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel.ops.feedforward import experts
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.ops.problem_sizes import DecodeSize, GemmSize, HeadShape, KernelTraits
from perfmodel.ops.routing import uniform_routing
from perfmodel.ops.work import BatchShape
from perfmodel.specs import load_hardware, load_model

HEADS = Heads(32, 8, 128, 64, "bf16", 2.0, 1.0, window=512)
FORM = LinearFormat("bf16", 2.0, 2.0, 2.0)


def test_one_kernel_for_prompts_and_decodes_has_both_extents():
    prompts, decodes = flash_prefill([(100, 50), (7, 0)], HEADS), attention_decode(9, 900, HEADS)
    mixed = mixed_attention([(100, 50), (7, 0)], 9, 900, HEADS)
    assert (mixed.problem.prompts, mixed.problem.decodes) == (prompts.problem, decodes.problem)
    assert mixed.problem.traits == decodes.problem.traits == KernelTraits(128, 1.0, 4.0)


@pytest.mark.parametrize(("local", "shares"), [(64, False), (8, True), (None, False)])
def test_experts_are_picked_by_their_gates_and_by_who_holds_them(local, shares):
    ffn = MoEFFN(64, 4, 512)
    work = experts(100, ffn, uniform_routing(ffn, 100, 1), FORM, width=256, intermediate=512, local_experts=local)
    assert work.problem.traits == KernelTraits(gates=2, shares_experts=shares)
    assert Domain(expert_parallel=shares, gates=2).distance(work.problem.traits) == 0
    assert Domain(expert_parallel=not shares).distance(work.problem.traits) > 0
    assert Domain(gates=1).distance(work.problem.traits) > 0


@given(st.integers(1, 10_000), st.integers(1, 500), st.integers(1, 16))
def test_equal_works_have_equal_extents_and_others_have_not(tokens, seqs, queries):
    assert flash_prefill([(tokens, 3)], HEADS) == flash_prefill([(tokens, 3)], HEADS)
    assert flash_prefill([(tokens, 3)], HEADS).problem != flash_prefill([(tokens, 4)], HEADS).problem
    one, other = (attention_decode(seqs, seqs * 100, HEADS, queries=q) for q in (queries, queries + 1))
    assert one != other
    assert one.problem.query_rows == 32 * queries


def test_every_operator_of_every_kind_of_layer_is_hashable_and_plain():
    """Extents are frozen numbers: a step's work can be a key, and nothing of it changes behind a memo."""
    shape = BatchShape(600, 40, ((512, 64), (24, 0)), 64, 64_000)
    for name in ("llama-3.1-8b", "deepseek-v3.2", "qwen3.5-35b-a3b", "mixtral-8x7b"):
        for node in build_graph(load_model(name)).nodes:
            work = node.work(shape)
            assert hash(work.problem) == hash(node.work(shape).problem)


def test_a_column_of_extents_is_taken_apart_and_put_together_again():
    heads = HeadShape(np.arange(1.0, 6.0), 1.0, 128.0, 128.0, 2.0, np.zeros(5))
    whole = DecodeSize(heads, num_seqs=np.arange(5.0), kv_tokens=np.arange(5.0) * 100)
    parts = [take(whole, np.arange(5) < 2), take(whole, slice(2, 5))]
    assert [len(part.num_seqs) for part in parts] == [2, 3]
    again = joined(parts)
    np.testing.assert_array_equal(again.heads.num_heads, heads.num_heads)
    np.testing.assert_array_equal(again.kv_tokens, whole.kv_tokens)
    assert (again.heads.head_dim, again.queries) == (128.0, 1.0)


def test_a_family_with_a_form_for_other_sizes_is_refused_in_a_sentence():
    """A calibration by hand that times matrix multiplications as attention: no traceback, but what does not fit."""
    calibration = Calibration(device="h100", engine="mine", families={"gemm": FlashDecodeFit()})
    timer = OperatorTimer(load_hardware("h100-sxm-80gb"), calibration)
    with pytest.raises(SpecError, match="family 'gemm' has a fit whose kernel model reads a DecodeSize, and x has"):
        timer.time(gemm("x", 8, 64, 64, FORM))
    other = OperatorTimer(timer.hardware, calibration.model_copy(update={"families": {"sampling": TiledGemmFit()}}))
    sample = next(node for node in build_graph(load_model("llama-3.1-8b")).nodes if node.name == "sample")
    with pytest.raises(SpecError, match="sample has none"):
        other.time(sample.work(decode_shape(4, 100)))


def test_a_form_reads_its_own_type():
    assert gemm("x", 8, 64, 32, FORM).problem_as(GemmSize) == GemmSize(8, 64, 32, 2.0, 2.0)
