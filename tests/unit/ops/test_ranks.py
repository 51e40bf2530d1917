"""Ranks over nodes: vLLM's layout, groups over nodes, shares of heads, experts and layers, and groups of one rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, send_recv
from perfmodel.ops.messages import RankGroup, spread_over
from perfmodel.ops.sharding import Sharding, stages

degrees = st.integers(1, 5)


def groups(axis, tp, pp=1, dp=1, stage=None):
    return RankGroup(axis, tp, pp, dp, stage).members().tolist()


def test_groups_are_those_of_vllm():
    """The example in the docstring of vLLM's initialize_model_parallel: 8 GPUs, tensor 2, pipeline 4."""
    assert groups("tensor", 2, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    chains = [[0, 2, 4, 6], [1, 3, 5, 7]]
    neighbours = sorted([chain[i], chain[i + 1]] for chain in chains for i in range(3))
    assert sorted(groups("pipeline", 2, 4)) == neighbours


def test_data_parallel_ranks_are_outermost():
    """arange(dp pp tp).reshape(dp, pp, tp): with dp 2, pp 2, tp 2 rank 4 is the second data-parallel rank's first."""
    assert groups("data", 2, 2, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups("expert", 2, 2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("group", "devices_per_node", "num_nodes", "most", "least", "crossing"),
    [
        (RankGroup("tensor", 8, 2), 8, 1, 8, 8, 0.0),
        (RankGroup("pipeline", 8, 2), 8, 2, 1, 1, 1.0),
        (RankGroup("pipeline", 4, 4), 8, 2, 1, 1, 1 / 3),  # stages 0 1 | 2 3: of three sends one crosses
        (RankGroup("pipeline", 4, 4, stage=0), 8, 1, 2, 2, 0.0),
        (RankGroup("pipeline", 4, 4, stage=1), 8, 2, 1, 1, 1.0),
        (RankGroup("tensor", 16), 8, 2, 8, 8, 1.0),
        (RankGroup("tensor", 12), 8, 2, 8, 4, 1.0),
        (RankGroup("tensor", 6, dp=4), 8, 2, 4, 2, 0.5),  # ranks 6 to 11 and 12 to 17 straddle nodes, and so on
        (RankGroup("expert", 4, dp=8), 8, 4, 8, 8, 1.0),
        (RankGroup("data", 8, dp=4), 8, 4, 1, 1, 1.0),
        (RankGroup("tensor", 64), 72, 1, 64, 64, 0.0),
    ],
)
def test_groups_on_nodes(group, devices_per_node, num_nodes, most, least, crossing):
    spread = spread_over(group, devices_per_node)
    assert (spread.num_nodes, spread.most, spread.least) == (num_nodes, most, least)
    assert spread.crossing == pytest.approx(crossing)


@given(st.sampled_from(["tensor", "data", "expert"]), degrees, degrees, degrees, st.integers(1, 16))
def test_every_rank_is_in_one_group_of_an_axis_and_on_one_node(axis, tp, pp, dp, devices_per_node):
    group = RankGroup(axis, tp, pp, dp)
    members = group.members()
    assert sorted(members.ravel().tolist()) == list(range(tp * pp * dp))
    assert members.shape[1] == group.num_ranks
    spread = spread_over(group, devices_per_node)
    assert spread.least <= spread.most <= min(devices_per_node, group.num_ranks)
    assert spread.num_nodes * spread.least <= group.num_ranks <= spread.num_nodes * spread.most


@given(st.integers(1, 6), st.integers(2, 6), st.integers(1, 3), st.integers(1, 16))
def test_what_crosses_a_pipeline_is_the_mean_over_its_stages(tp, pp, dp, devices_per_node):
    each = [spread_over(RankGroup("pipeline", tp, pp, dp, stage), devices_per_node).crossing for stage in range(pp - 1)]
    assert spread_over(RankGroup("pipeline", tp, pp, dp), devices_per_node).crossing == pytest.approx(
        sum(each) / len(each)
    )


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 4), st.integers(0, 40))
def test_ranks_share_heads_columns_and_experts_within_one_of_their_share(count, tp, dp, copies):
    """Heads and columns over the ranks of a tensor-parallel group, experts with their copies over all ranks; with
    fewer KV heads than ranks, every rank has one."""
    shard = Sharding(tp, dp=dp, is_expert_parallel=True, num_redundant_experts=copies)
    for held, ranks, whole in (
        (shard.columns(count), tp, count),
        (shard.kv_heads(count), tp, count),
        (shard.local_experts(count), tp * dp, count + copies),
    ):
        assert held >= 1
        assert whole <= held * ranks < whole + ranks


@given(st.integers(1, 120), st.integers(1, 16))
def test_stages_share_all_layers_and_the_last_has_the_fewest(num_layers, num_stages):
    """vLLM: the last stage also has the head, so the remainder goes to earlier stages."""
    spans = stages(max(num_layers, num_stages), num_stages)
    assert [layer for span in spans for layer in span] == list(range(max(num_layers, num_stages)))
    sizes = [len(span) for span in spans]
    assert sizes[-1] == min(sizes)
    assert max(sizes) <= min(sizes) + 1


@pytest.mark.parametrize("collective", [all_reduce, all_gather, reduce_scatter, all_to_all, send_recv])
def test_one_rank_or_no_bytes_need_no_message(collective):
    for payload, ranks in ((1e6, 1), (1e6, RankGroup("tensor", 1, dp=4)), (0, 8)):
        work = collective(payload, ranks)
        assert (work.message, work.num_kernels) == (None, 0)
    work = collective(1e6, RankGroup("tensor", 4))
    message = work.message
    assert (message.kind, message.bytes_, message.num_ranks) == (collective.__name__, 1e6, 4)
    assert work.num_kernels == 1
