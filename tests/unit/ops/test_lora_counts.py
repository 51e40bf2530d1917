"""LoRA operators by hand: FLOPs, bytes, thread blocks, sharding, and how many adapters a batch has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.work import AdapterMix, BatchShape, Depends, Work, decode_shape
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import Adapters

HEADS = Attention(num_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64)
MODEL = ModelSpec(
    name="two-layers",
    model_type="unknown",
    hidden_size=512,
    vocab_size=1000,
    max_position_embeddings=4096,
    norm_eps=1e-5,
    layers=((Layer(HEADS, DenseFFN(2048)), 2),),
    dtype="bf16",
)


def graph(tp: int = 1, adapters: Adapters | None = None, **fields: object) -> StepGraph:
    lora = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16, **fields}
    return build_graph(MODEL, EngineSpec(tensor_parallel_size=tp, **lora), adapters=adapters or Adapters(count=8))


def works(shape: BatchShape, own: StepGraph) -> dict[str, Work]:
    return {node.name: node.work(shape) for node in own.by_depends[Depends.ADAPTERS]}


STEP = decode_shape(20, 100)._replace(num_adapters=3, adapter_tokens=12)


def test_shrink_and_expand_of_queries_keys_and_values() -> None:
    """12 of 20 tokens, 3 adapters, rank 16, K = 512 in 3 slices, N = 512 + 128 + 128 = 768.

    shrink: 2 x 12 x 16 x 512 x 3 FLOPs, 3 x 16 x 512 x 3 weights of 2 bytes, 12 x 512 inputs of 2 bytes and 12 x 16 x 3
    sums of 4 bytes, zeroed and written; 64 x 1 x 1 x 3 blocks for each of 8 slots and none
    expand: 2 x 12 x 16 x 768 FLOPs, 3 x 16 x 768 weights, sums read, 12 x 768 outputs read and written;
    1 x ceil(512 / 64) x 3 blocks for each of these 9."""
    own = works(STEP, graph())
    shrink, expand = own["qkv_proj_shrink"], own["qkv_proj_expand"]
    assert shrink.flops == 2 * 12 * 16 * 512 * 3
    assert shrink.weight_bytes == 3 * 16 * 512 * 3 * 2
    assert shrink.activation_bytes == 12 * (512 * 2 + 2 * 16 * 3 * 4)
    assert shrink.problem is not None
    assert shrink.problem.num_items == 64 * 3 * 9  # type: ignore[attr-defined]
    assert expand.flops == 2 * 12 * 16 * 768
    assert expand.weight_bytes == 3 * 16 * 768 * 2
    assert expand.activation_bytes == 12 * (16 * 3 * 4 + 2 * 768 * 2)
    assert expand.problem is not None
    assert expand.problem.num_items == 8 * 3 * 9  # type: ignore[attr-defined]


def test_blocks_follow_all_tokens_of_the_step_and_the_slots_not_the_adapters() -> None:
    """2,048 tokens: K in 8 parts, 64 tiles of 32 rows; outputs in 32 tiles of 64 rows."""
    prompt = BatchShape(2048, 1, ((2048, 0),), num_adapters=1, adapter_tokens=100)
    own = works(prompt, graph(max_loras=2))
    assert own["o_proj_shrink"].problem.num_items == 8 * 64 * 1 * 3  # type: ignore[union-attr]
    assert own["o_proj_expand"].problem.num_items == 32 * (512 // 128) * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("tp", [2, 4])
def test_columns_are_cut_behind_the_rank_and_rows_before_it(tp: int) -> None:
    """Of columns A is whole on each device, of rows B: halves of the products are computed on all devices."""
    whole, part = works(STEP, graph()), works(STEP, graph(tp))
    kv_heads = max(1, 2 // tp)
    assert part["qkv_proj_shrink"].flops == whole["qkv_proj_shrink"].flops
    assert part["qkv_proj_expand"].flops == 2 * 12 * 16 * (8 // tp + 2 * kv_heads) * 64
    assert part["o_proj_shrink"].flops * tp == whole["o_proj_shrink"].flops
    assert part["o_proj_expand"].flops == whole["o_proj_expand"].flops
    assert part["gate_up_proj_expand"].flops * tp == whole["gate_up_proj_expand"].flops
    assert part["down_proj_shrink"].flops * tp == whole["down_proj_shrink"].flops
    assert part["lm_head_expand"] == whole["lm_head_expand"]


def test_named_modules_alone_have_adapters() -> None:
    own = graph(lora_target_modules=("o_proj", "down_proj"))
    assert {node.name for node in own.by_depends[Depends.ADAPTERS]} == {
        *("o_proj_shrink", "o_proj_expand", "down_proj_shrink", "down_proj_expand")
    }
    assert all(node.count == 2 for node in own.by_depends[Depends.ADAPTERS])


def test_without_adapters_nothing_is_launched() -> None:
    for name, work in works(STEP._replace(num_adapters=0, adapter_tokens=0), graph()).items():
        assert (work.num_kernels, work.flops, work.weight_bytes) == (0, 0, 0), name
    assert not build_graph(MODEL, EngineSpec()).by_depends[Depends.ADAPTERS]
    assert not build_graph(MODEL, EngineSpec(enable_lora=True)).by_depends[Depends.ADAPTERS]  # none are named


def test_adapters_one_by_one_are_counted_one_by_one() -> None:
    own = works(STEP, graph(profile="perfmodel"))
    assert own["o_proj_shrink"].problem.num_items == 3  # type: ignore[union-attr]
    assert own["o_proj_shrink"].num_kernels == 3 * 2


@given(
    count=st.integers(1, 60), batch=st.integers(1, 80), zipf=st.sampled_from([0, 0.3, 1, 3]), share=st.floats(0.05, 1)
)
def test_expected_adapters_of_a_batch(count: int, batch: int, zipf: float, share: float) -> None:
    """Of equally popular ones count (1 - (1 - share / count)^n); skew lowers it; never more than the slots."""
    mix = AdapterMix(16, 8, None, Adapters(count=count, zipf=zipf, share=share).chances, True)
    even = AdapterMix(1000, 8, None, Adapters(count=count, share=share).chances, True)
    num_adapters, num_tokens = mix.of(decode_shape(batch, 10))
    closed = count * (1 - (1 - share / count) ** batch)
    assert even.of(decode_shape(batch, 10))[0] == pytest.approx(closed)
    assert num_adapters <= min(closed, 16) * (1 + 1e-9)
    assert num_tokens == pytest.approx(share * batch)
    assert mix.of(decode_shape(batch, 10)._replace(num_adapters=2, adapter_tokens=7)) == (2, 7)


def test_popularity_follows_zipf_s_law() -> None:
    chances = Adapters(count=4, zipf=1, share=0.5).chances
    assert chances == pytest.approx([0.5 * share / (25 / 12) for share in (1, 1 / 2, 1 / 3, 1 / 4)])
    assert Adapters(count=2, shares=(3, 1)).chances == (0.75, 0.25)
