"""Tensor parallelism: shards put together are the whole, and ranks together compute what one computes alone."""

import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN  # noqa: E402
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.models.random_weights import TRAINED  # noqa: E402
from perfmodel_executors.parallel.group import ALONE, ONLY_STAGE, TensorGroup  # noqa: E402
from perfmodel_executors.parallel.ranks import open_runner  # noqa: E402
from perfmodel_executors.runner import RunnerSetup  # noqa: E402

BLOCK = 4
GENERATOR = torch.Generator().manual_seed(7)
PROMPT = torch.randint(101, (13,), generator=GENERATOR).tolist()


class ThreadGroup(TensorGroup):
    """Ranks as threads of this process: they meet at a barrier, and each reads what the others brought."""

    def __init__(self, rank, size, meeting, experts=None):
        self.rank, self.size, self.experts, self.stage = rank, size, experts, ONLY_STAGE
        self._barrier, self._brought = meeting

    def _exchange(self, tensor):
        self._brought[self.rank] = tensor
        self._barrier.wait(60)
        everyone = list(self._brought)
        self._barrier.wait(60)
        return everyone

    def all_reduce(self, partial):
        return sum(self._exchange(partial))

    def gather(self, shard_SV, size):
        return torch.cat(self._exchange(shard_SV), -1)[..., :size]


def logits(model, group=ALONE, routing=TRAINED):
    """Logits of a chunk, and of a decode with another chunk beside it."""
    decoder = Decoder(model, torch.float32, seed=1, group=group, routing=routing)
    cache = decoder.new_cache(BLOCK, 8)
    with torch.inference_mode():
        first = decoder.forward(build_batch([TokenSegment(PROMPT, 0, [5, 2, 7, 0])], BLOCK), cache)
        segments = [TokenSegment([9], 13, [5, 2, 7, 0]), TokenSegment(PROMPT[:6], 0, [1, 3])]
        return torch.cat((first, decoder.forward(build_batch(segments, BLOCK), cache)))


def on_threads(size, run):
    """What `run(rank)` gives on a thread of each rank; None where it raises."""
    results = [None] * size

    def keep(rank):
        results[rank] = run(rank)

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def together(model, size, experts=None, routing=TRAINED):
    """The same from `size` ranks; each of them has all logits."""
    meeting = threading.Barrier(size), [None] * size
    return on_threads(size, lambda rank: logits(model, ThreadGroup(rank, size, meeting, experts), routing))


# All features with 2 ranks; 4 ranks share 2 KV heads, and 101 rows of the vocabulary leave the last rank fewer.
@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in sorted(MODELS)), ("gqa", 4), ("moe", 4)])
def test_ranks_together_compute_the_logits_of_one(name, size):
    model = MODELS[name]
    expected = logits(model)
    for actual in together(model, size):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_holds_its_share_of_weights_and_cache():
    whole = Decoder(MODELS["gqa"], torch.float32)
    part = Decoder(MODELS["gqa"], torch.float32, group=ThreadGroup(1, 2, (None, [])))
    mixer, ffn = part.weights.layers[0].mixer, part.weights.layers[0].ffn
    full_mixer, full_ffn = whole.weights.layers[0].mixer, whole.weights.layers[0].ffn
    for ours, all_of_it in ((mixer.qkv, full_mixer.qkv), (mixer.out, full_mixer.out), (ffn.up, full_ffn.up)):
        assert 2 * ours.numel() == all_of_it.numel()
    assert torch.equal(ffn.down, full_ffn.down[:, 24:])
    assert torch.equal(part.weights.embedding[:50], whole.weights.embedding[51:])
    assert not part.weights.embedding[50:].any()
    assert part.new_cache(BLOCK, 3).pages[0][0].shape == (3, BLOCK, 1, 8)


@pytest.mark.parametrize(
    ("model", "size", "field"),
    [
        (MODELS["gqa"], 3, "num_attention_heads=4"),
        (tiny((attention(num_heads=12, num_kv_heads=4), DenseFFN(48))), 6, "num_key_value_heads=4"),
        (tiny((attention(), DenseFFN(intermediate_size=49))), 2, "intermediate_size=49"),
    ],
)
def test_what_cannot_be_shared_out_evenly_is_refused(model, size, field):
    with pytest.raises(PerfmodelError, match=f"{field} cannot be shared out evenly over tensor_parallel_size={size}"):
        Decoder(replace(model), torch.float32, group=ThreadGroup(0, size, (None, [])))


def test_ranks_that_cannot_share_the_model_are_not_started():
    engine = EngineSpec(dtype="float32", tensor_parallel_size=3)
    setup = RunnerSetup(MODELS["gqa"], engine, 64, torch.device("cpu"))
    with pytest.raises(PerfmodelError, match="num_attention_heads=4"), open_runner(setup):
        pass
