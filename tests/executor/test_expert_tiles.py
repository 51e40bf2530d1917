"""What the host decides for grouped experts, and the problems that measure them."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.evidence.fit.products import rank_load  # noqa: E402
from perfmodel_executors.kernels.launch import Options  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig  # noqa: E402
from perfmodel_executors.kernels.triton.moe_tiles import block_rows, candidates, num_splits  # noqa: E402

TILE = TileConfig({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}, Options(4, 4))


def test_tiles_grow_with_the_rows_of_an_expert():
    rows = [block_rows(tokens, 128, 8) for tokens in (1, 16, 64, 256, 1024, 4096, 65536)]
    assert rows == sorted(rows)
    assert rows[0] == 16
    assert rows[-1] == 128
    assert block_rows(64, 8, 2) > block_rows(64, 128, 2)


def test_sums_are_split_only_while_few_programs_run():
    """Mixtral's down projection has 128 programs for one token; with more tokens, or experts, there are enough."""
    assert num_splits(1, 8, 2, 4096, 14336, TILE) == 4
    assert num_splits(16, 8, 2, 4096, 14336, TILE) == 1
    assert num_splits(1, 128, 8, 2048, 768, TILE) == 1  # 6 steps are too few to share


def test_where_warps_multiply_their_sums_are_fewer():
    for kernel in ("up", "down"):
        assert 0 < len(candidates(kernel, 128, 80)) < len(candidates(kernel, 128, 90))
        assert candidates(kernel, 16, 80) == candidates(kernel, 16, 90)


@pytest.mark.parametrize("problem", problems_of("grouped_experts")[::4], ids=str)
def test_serving_problems_are_routed_as_the_measured_tables_are(problem):
    sizes = problem.sizes
    load = rank_load(sizes["num_tokens"], sizes["num_experts"], sizes["topk"], 1, sizes["distribution"])
    assert problem.work.problem.distinct == load.distinct
    assert problem.work.problem.assignments == load.assignments
    assert problem.work.problem.tiles[0] == load.tiles[0]


def test_a_token_of_a_serving_problem_has_distinct_experts():
    for problem in problems_of("grouped_experts"):
        shape = problem.make(Inputs("meta"))[2].shape
        assert shape == (problem.sizes["num_tokens"], problem.sizes["topk"])
    from perfmodel_executors.kernels.moe import _balanced

    for tokens, experts, top_k in ((1, 8, 2), (5, 64, 6), (100, 60, 4), (7, 128, 8)):
        assert all(len(set(chosen)) == top_k for chosen in _balanced(tokens, experts, top_k))
