"""Laws of the attention kernels, which hold whatever the numbers: cut, split or tree, the answer is the same."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.attention_prefill import AttentionRule  # noqa: E402
from perfmodel_executors.kernels.kv_pages import FP8, Chunks, random_pages  # noqa: E402
from perfmodel_executors.kernels.launch import Options  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig  # noqa: E402
from perfmodel_executors.kernels.triton.attention_decode import num_splits_for  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 16
TILES = TileConfig({"ROWS": 32, "KEYS": 32}, Options(4, 2))
KERNELS = load_kernels("triton")


def sequence(length, dtype=torch.float32):
    """Queries of all tokens, pages and the block table of one sequence."""
    inputs, width = Inputs("cpu", seed=length), -(-length // PAGE)
    q = inputs.normal(length, HEADS, DIM, dtype=torch.float32)
    pages = random_pages(inputs, width + 2, PAGE, KV_HEADS, (DIM, DIM), torch.float32, dtype)
    return q, pages, inputs.permutation(width + 2)[None, :width]


def prefill(q, pages, table, begin, end, ancestors=None, **spans):
    chunks = Chunks(table, torch.tensor([0, end - begin]), torch.tensor([begin]), ancestors)
    return KERNELS.attention_prefill(q[begin:end], pages, chunks, AttentionRule(**spans))


@pytest.mark.parametrize("spans", [{}, {"window": 20}, {"chunk": 37}], ids=str)
def test_a_prompt_in_chunks_is_the_prompt_at_once(spans):
    q, pages, table = sequence(90)
    whole = prefill(q, pages, table, 0, 90, **spans)
    parts = [prefill(q, pages, table, *ends, **spans) for ends in ((0, 41), (41, 42), (42, 90))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, FP8, torch.int8], ids=str)
@pytest.mark.parametrize("spans", [{}, {"window": 20}, {"chunk": 37}], ids=str)
def test_a_decode_is_the_last_row_of_a_prompt(spans, dtype):
    q, pages, table = sequence(85, dtype)
    last = KERNELS.attention_decode(q[-1:], pages, table, torch.tensor([85]), AttentionRule(**spans))
    torch.testing.assert_close(last, prefill(q, pages, table, 60, 85, **spans)[-1:], rtol=0, atol=1e-6)


def test_a_chain_of_drafted_tokens_is_causal():
    q, pages, table = sequence(83)
    chain = torch.tensor([(1 << (i + 1)) - 1 if i < 63 else -1 for i in range(64)])
    for begin, end in ((19, 83), (0, 64), (50, 55)):
        as_tree = prefill(q, pages, table, begin, end, chain[: end - begin])
        torch.testing.assert_close(as_tree, prefill(q, pages, table, begin, end), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("splits", [2, 3, 9])
def test_splitting_the_context_changes_nothing_also_when_parts_are_empty(splits, window):
    q, pages, table = sequence(150)
    arguments = (q[:3], pages, table.expand(3, -1), torch.tensor([150, 17, 1]), AttentionRule(window))
    config = TileConfig({"TILE": 32}, Options(4, 2))
    split = KERNELS.attention_decode(*arguments, num_splits=splits, config=config)
    torch.testing.assert_close(split, KERNELS.attention_decode(*arguments, num_splits=1), rtol=0, atol=1e-6)


def test_a_context_of_zero_tokens_gives_zero():
    """Rows that pad a captured batch."""
    q, pages, table = sequence(20)
    for splits in (1, 3):
        out = KERNELS.attention_decode(q[:1], pages, table, torch.tensor([0]), num_splits=splits)
        assert not out.any()


def test_what_lies_behind_the_context_is_never_read():
    """Unwritten places of the last page, pages of others and ids in the padding of the table."""
    q, pages, table = sequence(70)
    slot = int(table[0, 70 // PAGE]) * PAGE + 70 % PAGE
    for side in pages[:2]:
        side.flatten(0, 1)[slot : slot + PAGE - 70 % PAGE] = torch.nan
    padded = torch.cat((table, torch.full((1, 3), 10**6)), dim=1)
    assert KERNELS.attention_decode(q[-1:], pages, padded, torch.tensor([70])).isfinite().all()
    assert prefill(q, pages, padded, 33, 70).isfinite().all()


def test_other_tiles_compute_the_same():
    q, pages, table = sequence(90)
    chunks = Chunks(table, torch.tensor([0, 50]), torch.tensor([40]))
    arguments = (q[40:], pages, chunks, AttentionRule(window=33))
    small = KERNELS.attention_prefill(*arguments, config=TILES)
    torch.testing.assert_close(small, KERNELS.attention_prefill(*arguments), rtol=0, atol=1e-6)


def test_splits_fill_the_machine_and_stop_there():
    """132 units, two blocks each: 264 slots. One long sequence of 8 KV heads takes 30 to 33 parts; what fills, none."""
    assert 264 * 0.9 <= 8 * num_splits_for(8, 100_000, 132) <= 264
    assert num_splits_for(256, 100_000, 132) == 1
    assert num_splits_for(4096, 100_000, 132) == 1
    assert num_splits_for(8, 300, 132) == 1
    assert num_splits_for(8, 1024, 132) <= 4
