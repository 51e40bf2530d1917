"""Whole experts on their ranks, placed and copied: the model of one rank, in the shares that the cost model counts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402
from test_parallel import BLOCK, PROMPT, ThreadGroup, logits, together  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import MoEFFN  # noqa: E402
from perfmodel.ops.graphs.step import build_graph  # noqa: E402
from perfmodel.ops.routing import consecutive_experts, place_experts  # noqa: E402
from perfmodel.ops.work import BatchShape  # noqa: E402
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel.specs.traffic import ExpertRouting  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.models.decoder import Decoder, load_decoder  # noqa: E402
from perfmodel_executors.parallel.experts import ExpertSharing, LocalExperts  # noqa: E402
from perfmodel_executors.parallel.ranks import open_ranks, open_runner, sharing_of  # noqa: E402
from perfmodel_executors.runner import RunnerSetup  # noqa: E402

CPU = torch.device("cpu")
SKEWED = ExpertRouting(distribution="power_law", alpha=1.2)
PLAIN = ExpertRouting()


@given(
    st.integers(1, 12), st.integers(1, 4), st.integers(0, 6), st.booleans(), st.integers(0, 60), st.integers(0, 1000)
)
@settings(max_examples=60, deadline=None)
def test_each_row_is_multiplied_once_and_ranks_get_what_the_cost_model_counts(
    num_experts: int, num_ranks: int, num_redundant: int, is_placed: bool, num_tokens: int, seed: int
) -> None:
    """Rows by rank and slot are those of `Placement.rows`, which is what simulated loads are made of."""
    rng = np.random.default_rng(seed)
    popularity = rng.random(num_experts) + 0.01
    placed = place_experts(popularity, num_ranks, num_redundant)
    placement = placed if is_placed else consecutive_experts(num_experts, num_ranks)
    top_k = min(2, num_experts)
    each = [rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]
    chosen = np.array(each, dtype=np.int64).reshape(num_tokens, top_k)
    expected = placement.rows(np.bincount(chosen.flatten(), minlength=num_experts))
    weights = torch.arange(num_tokens * top_k).view(num_tokens, top_k)  # tells the pairs apart
    seen = []
    for rank in range(num_ranks):
        local = LocalExperts.of(placement, rank, CPU)
        slots = local.slots(torch.from_numpy(chosen))
        pairs, slots = weights[slots >= 0], slots[slots >= 0]
        counts = torch.bincount(slots, minlength=len(local.held)).tolist()
        assert counts == expected[rank][placement.expert[rank] >= 0].tolist()
        assert [local.held[slot] for slot in slots] == [int(chosen.flatten()[pair]) for pair in pairs]
        seen += pairs.tolist()
    assert sorted(seen) == list(range(num_tokens * top_k))


@pytest.mark.parametrize(
    ("name", "size", "sharing"),
    [
        ("moe", 2, ExpertSharing(PLAIN)),
        ("moe", 4, ExpertSharing(PLAIN)),  # 6 experts on 4 ranks: two each, and none on the last
        ("shared-experts", 2, ExpertSharing(PLAIN)),
        ("moe", 2, ExpertSharing(SKEWED, 0)),
        ("moe", 2, ExpertSharing(SKEWED, 3)),
    ],
)
def test_ranks_of_whole_experts_compute_the_logits_of_one(name, size, sharing):
    model, routing = MODELS[name], sharing.routing
    expected = logits(model, routing=routing)
    for actual in together(model, size, sharing, routing):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_holds_its_experts_and_a_copy_of_popular_ones():
    whole = Decoder(MODELS["moe"], torch.float32, seed=1, routing=SKEWED).weights.layers[1].ffn
    sharing = ExpertSharing(SKEWED, 2)
    placement = sharing.placement(list(MODELS["moe"].iter_layers())[1].ffn, 1, 2)
    held = []
    for rank in range(2):
        group = ThreadGroup(rank, 2, (None, []), sharing)
        own = Decoder(MODELS["moe"], torch.float32, seed=1, group=group, routing=SKEWED).weights.layers[1].ffn
        assert own.local.held == tuple(placement.expert[rank].tolist())
        assert torch.equal(own.up, whole.up[placement.expert[rank]])
        assert torch.equal(own.down, whole.down[placement.expert[rank]])
        assert torch.equal(own.router_bias, whole.router_bias)
        held += own.local.held
    assert len(held) == 8
    assert set(held) == set(range(6))


def test_experts_with_biases_are_shared_out_whole_only():
    model = tiny((attention(), MoEFFN(4, 2, 16, bias=True)))
    actual = together(model, 2, ExpertSharing(PLAIN))[1]
    torch.testing.assert_close(actual, logits(model), rtol=1e-4, atol=1e-4)
    with pytest.raises(PerfmodelError, match="experts with biases, cut by their width"):
        Decoder(model, torch.float32, group=ThreadGroup(0, 2, (None, [])))


STEPS = [
    [TokenSegment(PROMPT, 0, [5, 2, 7, 0]), TokenSegment(PROMPT[:6], 0, [1, 3])],
    [TokenSegment([9], 13, [5, 2, 7, 0]), TokenSegment([4, 8], 6, [1, 3])],
    [TokenSegment([3], 14, [5, 2, 7, 0]), TokenSegment(PROMPT, 0, [90, 91, 92, 93])],  # the pool has to grow
]
SHAPES = [
    BatchShape(19, 2, ((13, 0), (6, 0))),
    BatchShape(3, 2, ((2, 6),), 1, 14),
    BatchShape(14, 2, ((13, 0),), 1, 15),
]


def engine(size, **more):
    return EngineSpec(dtype="float32", block_size=BLOCK, tensor_parallel_size=size, **more)


def messages(model, shape, served):
    """Kind and bytes of each message in the simulator's step graph."""
    works = [(node, node.work(shape)) for node in build_graph(model, served).nodes]
    found = Counter()
    for node, work in works:
        if work.message is not None:
            found[work.message.kind, int(work.message.bytes_)] += node.count
    return found


def test_processes_serve_the_tokens_of_one_and_say_what_the_simulator_counts():
    """Sliced, whole, and placed experts on one pair of processes, through Gloo on the loopback interface: messages by
    number and bytes; time is the critical path, at least what either rank's thread spends."""
    kinds = [{}, {"enable_expert_parallel": True}]
    kinds.append({"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}})
    setups = [RunnerSetup(MODELS["moe"], engine(2, **more), 64, CPU, 1, routing=SKEWED) for more in kinds]
    alone = RunnerSetup(MODELS["moe"], engine(1), 64, CPU, 1, routing=SKEWED)
    with open_runner(alone) as runner:
        for step in STEPS:
            runner.reserve_for(step)
        expected = [runner.run(step) for step in STEPS]
    with open_ranks(2, CPU) as ranks:
        for setup in setups:
            runner = ranks.runner(setup)
            clock = runner.new_clock()
            for step, shape, tokens in zip(STEPS, SHAPES, expected, strict=True):
                runner.reserve_for(step)
                before = clock()
                assert runner.run(step) == tokens
                assert clock() > before
                assert Counter(runner.messages) == messages(MODELS["moe"], shape, setup.engine)


def test_how_the_engine_shares_out_experts():
    assert sharing_of(engine(2), SKEWED) is None
    assert sharing_of(engine(2, enable_expert_parallel=True), SKEWED) == ExpertSharing(SKEWED, None)
    assert sharing_of(engine(2, enable_expert_parallel=True, enable_eplb=True), SKEWED) == ExpertSharing(SKEWED, 0)


def test_whole_experts_of_a_fixed_capacity_are_refused():
    group = ThreadGroup(0, 2, (None, []), ExpertSharing(PLAIN))
    with pytest.raises(PerfmodelError, match="fixed capacity are not executed whole"):
        load_decoder(MODELS["moe"], engine(2), group=group, routing=ExpertRouting(capacity_factor=2))
