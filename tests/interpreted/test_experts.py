"""Laws of the mixture of experts' kernels: where tokens go, and that nothing depends on how the work is cut."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels import moe as reference  # noqa: E402
from perfmodel_executors.kernels.launch import Options  # noqa: E402
from perfmodel_executors.kernels.moe import ExpertLayer, RoutingRule  # noqa: E402
from perfmodel_executors.kernels.stored_rows import ExpertWeight, quantize_experts  # noqa: E402
from perfmodel_executors.kernels.swiglu import ACTIVATIONS  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig  # noqa: E402
from perfmodel_executors.kernels.triton.moe import grouped_experts, route  # noqa: E402
from perfmodel_executors.kernels.triton.moe_tiles import (  # noqa: E402
    most_tiles,
    num_splits,
    sort_pairs,
)
from perfmodel_executors.kernels.weight_formats import (  # noqa: E402
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
)

STORED = {
    "int8": quantize_int8,
    "int4": lambda w: quantize_int4(w, group_size=32),
    "int4 with zeros": lambda w: quantize_int4(w, group_size=32, has_zeros=True),
    "fp8": lambda w: quantize_fp8(w, quantizes_input=False),
    "mxfp4": quantize_mxfp4,
    "nvfp4": quantize_nvfp4,
}


def tile(rows=16, columns=64, depth=64):
    return TileConfig({"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth}, Options(4, 3))


def experts_of(x, weights, chosen, up, down, activation="silu", gated=True, config=None):
    """What the kernels make of the arguments of `block`."""
    return grouped_experts(x, weights, chosen, ExpertLayer(up, down, activation, gated), config)


def block(tokens, hidden=40, inner=24, experts=4, top_k=2, gated=True, seed=0):
    """Arguments of `experts_of` but the activation, in fp32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    weights, chosen = reference.route(normal(tokens, experts), top_k)
    x = torch.randn(tokens, hidden, generator=generator)
    up = normal(experts, inner * (2 if gated else 1), hidden)
    return x, weights, chosen, up, normal(experts, hidden, inner)


def dense(x, weights, chosen, up, down, activation="silu", gated=True):
    """Every expert on every token in fp64, weighted by a matrix of routing weights."""
    share = torch.zeros(x.shape[0], up.shape[0], dtype=torch.float64).scatter_add_(1, chosen, weights.double())
    h = torch.einsum("efc,tc->tef", up.double(), x.double())
    act = ACTIVATIONS[activation]
    h = act(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :] if gated else act(h)
    return torch.einsum("eci,tei,te->tc", down.double(), h, share)


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 8), (7, 60, 4), (40, 5, 3), (9, 300, 2)])
@pytest.mark.parametrize("rows", [16, 64])
def test_sorting_loses_and_doubles_nothing(tokens, experts, top_k, rows):
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    chosen = torch.topk(logits, top_k).indices
    order, tiles, num_tiles = sort_pairs(chosen, experts, rows)
    tiles = tiles[: int(num_tiles)]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    assert torch.equal(order.sort().values.long(), torch.arange(tokens * top_k))
    assert torch.equal(torch.bincount(order.long() // top_k), torch.full((tokens,), top_k))
    assert int(tiles[:, 2].sum()) == tokens * top_k
    # As many tiles as each expert's rows fill, none for one without rows, and never more than the host expects.
    assert torch.equal(torch.bincount(tiles[:, 0].long(), minlength=experts), -(-counts // rows))
    assert len(tiles) <= most_tiles(tokens * top_k, experts, rows)
    for expert, begin, length in tiles.tolist():
        pairs = order[begin : begin + length].long()
        assert (chosen.flatten()[pairs] == expert).all()
        assert pairs.tolist() == sorted(pairs.tolist())


def test_the_host_knows_the_most_tiles_exactly():
    """Each expert with one row more than whole tiles; and all pairs on one expert need no more."""
    experts, rows = 5, 16
    chosen = torch.arange(experts).repeat(rows + 1)[:, None]
    _, tiles, num_tiles = sort_pairs(chosen, experts, rows)
    assert int(num_tiles) == len(tiles) == 2 * experts
    _, tiles, num_tiles = sort_pairs(torch.full((50, 1), 3), experts, rows)
    assert int(num_tiles) == 4 <= len(tiles)
    assert (tiles[:4, 0] == 3).all()


def test_the_lowest_of_equal_experts_comes_first():
    weights, chosen = route(torch.zeros(2, 7), 3)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_the_best_of_few_groups_are_chosen_by_their_best_two():
    """Group 0 has the best expert, group 1 the best two: DeepSeek-V3's rule takes the second, and weights are the
    sigmoids of the chosen without the bias that chose them."""
    rule = RoutingRule("sigmoid", scale=2.0, num_groups=3, top_k_groups=1, groups_by="top2")
    logits = torch.tensor([[3.0, -9.0, -9.0, 1.0, 0.5, 0.4, 0.0, 0.0, 0.0]])
    bias = torch.tensor([0.0] * 5 + [0.2] + [0.0] * 3)
    weights, chosen = route(logits, 2, rule, bias)
    assert chosen.tolist() == [[5, 3]]
    scores = torch.sigmoid(torch.tensor([[0.4, 1.0]]))
    torch.testing.assert_close(weights, 2 * scores / scores.sum())


def test_weights_survive_logits_that_would_overflow():
    weights, chosen = route(torch.tensor([[1e4, -1e4, 1e4 + 8, 0.0]]), 2)
    assert chosen.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[8.0, 0.0]]), -1))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 5, 3), (16, 16, 2), (16, 5, 2), (17, 16, 2), (37, 5, 1)])
def test_the_result_is_that_of_all_experts_on_all_tokens(tokens, experts, top_k):
    args = block(tokens, experts=experts, top_k=top_k, inner=33)
    close(experts_of(*args, "silu", True), dense(*args))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation_of_the_reference_is_there(activation):
    args = block(2, gated=False)
    close(experts_of(*args, activation, False), dense(*args, activation, False))


@pytest.mark.parametrize("tokens", [9, 20])
def test_tokens_may_come_in_any_order(tokens):
    x, weights, chosen, *matrices = block(tokens, experts=9)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(3))
    straight = experts_of(x, weights, chosen, *matrices, "silu", True)
    shuffled = experts_of(x[order], weights[order], chosen[order], *matrices, "silu", True)
    close(shuffled, straight[order])


def test_tokens_need_no_company():
    """Sorted, found in the routing table, and alone: the same to the rounding of sums."""
    x, weights, chosen, *matrices = block(20, experts=9)
    together = experts_of(x, weights, chosen, *matrices, "silu", True)
    few = experts_of(x[:9], weights[:9], chosen[:9], *matrices, "silu", True)
    alone = experts_of(x[:1], weights[:1], chosen[:1], *matrices, "silu", True)
    close(few, together[:9])
    close(alone, together[:1])


def test_all_tokens_on_one_expert():
    x, weights, _, up, down = block(40, top_k=1, experts=6)
    chosen = torch.full((40, 1), 4)
    close(experts_of(x, weights, chosen, up, down, "silu", True), dense(x, weights, chosen, up, down))


def test_a_split_sum_is_the_sum():
    args, config = block(2, hidden=24, inner=530), tile(columns=256, depth=32)
    assert num_splits(2, 4, 2, 24, 530, config) == 2  # 17 steps: parts of 9 and 8, the last one odd
    close(experts_of(*args, "silu", True, config=config), dense(*args))


def test_rows_of_a_wider_matrix():
    x, *rest = block(3)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    assert torch.equal(experts_of(wide, *rest, "silu", True), experts_of(x, *rest, "silu", True))


def stored_block(name, tokens, **sizes):
    """`block` with matrices in fewer bits, and the plain matrices that those stand for."""
    *args, up, down = block(tokens, **{"hidden": 64, "inner": 64, **sizes})
    stored = [quantize_experts(matrix, STORED[name]) for matrix in (up, down)]
    return (*args, *stored), (*args, *(dequantize(w.stacked).view(w.shape) for w in stored))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", STORED)
def test_stored_experts_are_the_matrices_that_they_stand_for(name, gated):
    args, plain = stored_block(name, 19, experts=5, gated=gated)
    close(experts_of(*args, "silu", gated), dense(*plain, gated=gated))


def test_stored_experts_need_no_company_either():
    """Alone, found in the routing table, and sorted."""
    (x, weights, chosen, *matrices), _ = stored_block("int8", 20, experts=9)
    together = experts_of(x, weights, chosen, *matrices, "silu", True)
    for few in (1, 8):
        close(experts_of(x[:few], weights[:few], chosen[:few], *matrices, "silu", True), together[:few])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_split_sum_of_stored_experts_is_the_sum(name):
    config = TileConfig({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}, Options(4, 3))
    args, plain = stored_block(name, 2, hidden=64, inner=544)
    assert num_splits(2, 4, 2, 64, 544, config) == 2  # 17 steps: parts of 9 and 8
    close(experts_of(*args, "silu", True, config=config), dense(*plain))


def test_quantised_tokens_keep_their_own_scales():
    """A token thirty times larger than its neighbours in the tile does not coarsen them."""
    x, weights, chosen, up, down = block(4, experts=4, top_k=1, hidden=64, inner=32)
    chosen = torch.full_like(chosen, 2)
    stored = [ExpertWeight(quantize_int8(m.flatten(0, 1), quantizes_input=True), 4) for m in (up, down)]
    loud = x * torch.tensor([1.0, 30.0, 1.0, 1.0])[:, None]
    quiet, mixed = (experts_of(each, weights, chosen, *stored, "silu", True) for each in (x, loud))
    close(mixed[[0, 2, 3]], quiet[[0, 2, 3]])
