"""Decode context parallelism: keys and values striped over ranks give the logits and the text of one rank, and ranks
say to each other what the simulator counts."""

import threading
from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402
from test_expert_ranks import messages  # noqa: E402
from test_parallel import BLOCK, ThreadGroup, logits, on_threads  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN  # noqa: E402
from perfmodel.ops.work import BatchShape  # noqa: E402
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.parallel.ranks import check_shared_out, open_ranks, open_runner  # noqa: E402
from perfmodel_executors.runner import RunnerSetup  # noqa: E402

CPU = torch.device("cpu")
ONE_HEAD = tiny(*[(attention(num_kv_heads=1, v_head_dim=6), DenseFFN(48))] * 2)


class StripedThreads(ThreadGroup):
    def __init__(self, rank, size, meeting, num_stripes):
        super().__init__(rank, size, meeting)
        self.num_stripes = num_stripes

    def _neighbours(self, tensor):
        first = self.rank - self.stripe
        return self._exchange(tensor)[first : first + self.num_stripes]

    def gather_stripes(self, part):
        return self._neighbours(part)

    def scatter_stripes(self, parts_R):
        return sum(parts[self.stripe] for parts in self._neighbours(parts_R))


def striped(model, size, num_stripes):
    """Logits of each rank, of the chunks and decodes of `test_parallel.logits`."""
    meeting = threading.Barrier(size), [None] * size
    return on_threads(size, lambda rank: logits(model, StripedThreads(rank, size, meeting, num_stripes)))


@pytest.mark.parametrize(
    ("model", "size", "num_stripes"), [(ONE_HEAD, 2, 2), (ONE_HEAD, 4, 4), (ONE_HEAD, 4, 2), (MODELS["gqa"], 4, 2)]
)
def test_ranks_with_a_part_of_the_tokens_compute_the_logits_of_one(model, size, num_stripes):
    expected = logits(model)
    for actual in striped(model, size, num_stripes):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_keeps_its_share_of_a_block():
    group = StripedThreads(1, 2, (None, []), 2)
    pages = Decoder(ONE_HEAD, torch.float32, group=group).new_cache(BLOCK, 3).pages
    assert [tuple(tensor.shape) for tensor in pages[0].tensors] == [(3, BLOCK // 2, 1, 8), (3, BLOCK // 2, 1, 6)]


PROMPT = list(range(3, 16))
TABLE, OTHER = [5, 2, 7, 0], [1, 3]
# A chunk; a decode with a chunk that goes on; two decodes, one of them with a context of one rank alone; two chunks
# that go on behind odd numbers of tokens.
STEPS = [
    [TokenSegment(PROMPT[:8], 0, TABLE)],
    [TokenSegment(PROMPT[8:], 8, TABLE), TokenSegment(PROMPT[:1], 0, OTHER)],
    [TokenSegment([9], 13, TABLE), TokenSegment([4], 1, OTHER)],
    [TokenSegment([7], 2, OTHER), TokenSegment(PROMPT[:5], 0, [4, 6])],
    [TokenSegment([3, 1], 3, OTHER), TokenSegment(PROMPT[5:8], 5, [4, 6])],
]
SHAPES = [
    BatchShape(8, 1, ((8, 0),)),
    BatchShape(6, 2, ((5, 8),), 1, 1),
    BatchShape(2, 2, (), 2, 16),
    BatchShape(6, 2, ((5, 0),), 1, 3),
    BatchShape(5, 2, ((2, 3), (3, 5))),
]


@pytest.mark.xdist_group("ranks")
def test_processes_serve_the_tokens_of_one_and_say_what_the_simulator_counts():
    engine = EngineSpec(dtype="float32", block_size=BLOCK // 2, tensor_parallel_size=2, decode_context_parallel_size=2)
    assert engine.kv_block_tokens == BLOCK
    one = EngineSpec(dtype="float32", block_size=BLOCK)
    with open_runner(RunnerSetup(ONE_HEAD, one, 64, CPU, 1)) as runner:
        runner.reserve_for(STEPS[0])
        expected = [runner.run(step) for step in STEPS]
    with open_ranks(2, CPU) as ranks:
        runner = ranks.runner(RunnerSetup(ONE_HEAD, engine, 64, CPU, 1))
        for step, shape, tokens in zip(STEPS, SHAPES, expected, strict=True):
            runner.reserve_for(step)
            assert runner.run(step) == tokens
            assert Counter(runner.messages) == messages(ONE_HEAD, shape, engine)


@pytest.mark.parametrize(
    ("model", "more", "reason"),
    [
        (MODELS["gqa"], {}, "ranks without copies of a KV head"),
        (tiny((attention(num_kv_heads=1, window=9), DenseFFN(48))), {}, "other mixers"),
        (ONE_HEAD, {"kv_cache_dtype": "fp8"}, "a quantised KV cache"),
        (ONE_HEAD, {"attention": "standard"}, "standard attention"),
    ],
)
def test_what_is_not_executed_striped_is_refused(model, more, reason):
    engine = EngineSpec(dtype="float32", tensor_parallel_size=2, decode_context_parallel_size=2, **more)
    with pytest.raises(PerfmodelError, match=reason):
        check_shared_out(RunnerSetup(model, engine, 64, CPU))
