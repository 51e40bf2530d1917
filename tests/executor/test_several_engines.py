"""Several engines, each a process: replicas, data-parallel ranks that send tokens to their experts, prefill and decode
with KV on its way: the text of each request is what one engine gives it."""

import threading
import time
from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402
from test_expert_ranks import PLAIN, SKEWED  # noqa: E402
from test_faults import Killing  # noqa: E402
from test_parallel import BLOCK, PROMPT, ThreadGroup, on_threads  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.evidence.executed.compare import RunPrediction  # noqa: E402
from perfmodel.models.architecture import MoEFFN  # noqa: E402
from perfmodel.ops.graphs.step import build_graph  # noqa: E402
from perfmodel.ops.messages import distinct_ranks  # noqa: E402
from perfmodel.ops.work import BatchShape  # noqa: E402
from perfmodel.sim import simulate  # noqa: E402
from perfmodel.specs import EngineSpec, load_scenario  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.models.kv_cache import KVCache  # noqa: E402
from perfmodel_executors.parallel.experts import ExpertSharing  # noqa: E402
from perfmodel_executors.parallel.ranks import RankReply, critical_path  # noqa: E402
from perfmodel_executors.run import execute_scenario, validate_executor  # noqa: E402
from perfmodel_executors.tokens import TokenStore  # noqa: E402


class DataThreads(ThreadGroup):
    """Data-parallel ranks as threads. sent: rows to each rank, of each exchange."""

    sends_tokens = True

    def __init__(self, rank, size, meeting, experts):
        super().__init__(0, 1, meeting, experts)
        self.place, self.sent = (rank, size), []

    expert_rank = property(lambda self: self.place[0])
    num_expert_ranks = property(lambda self: self.place[1])

    def _exchange(self, tensor):
        self._brought[self.expert_rank] = tensor
        self._barrier.wait(60)
        everyone = list(self._brought)
        self._barrier.wait(60)
        return everyone

    def all_reduce(self, partial):
        return partial

    def gather(self, shard_SV, size):
        return shard_SV

    def exchange(self, rows_SB, counts):
        self.sent.append(counts)
        parts = [part[self.expert_rank] for part in self._exchange(rows_SB.split(counts))]
        return torch.cat(parts), list(map(len, parts))


def logits(decoder, prompt):
    batch = build_batch([TokenSegment(prompt, 0, [5, 2, 7, 0])], BLOCK)
    with torch.inference_mode():
        return decoder.forward(batch, decoder.new_cache(BLOCK, 8))


def on_data_ranks(model, prompts, sharing):
    """Logits of each prompt, one on each rank, none on others; and what each has sent."""
    meeting = threading.Barrier(len(prompts)), [None] * len(prompts)
    groups = [DataThreads(rank, len(prompts), meeting, sharing) for rank in range(len(prompts))]

    def run(rank):
        decoder = Decoder(model, torch.float32, seed=1, group=groups[rank], routing=sharing.routing)
        if prompts[rank]:
            return logits(decoder, prompts[rank])
        with torch.inference_mode():
            return decoder.assist()

    return on_threads(len(prompts), run), [group.sent for group in groups]


@pytest.mark.parametrize(
    ("name", "prompts", "sharing"),
    [
        ("moe", (PROMPT, PROMPT[:6]), ExpertSharing(PLAIN)),
        ("moe", (PROMPT, [], PROMPT[:6], []), ExpertSharing(PLAIN)),  # no tokens on two, no experts on one
        ("moe", (PROMPT, PROMPT[:6]), ExpertSharing(SKEWED, 3)),
        ("shared-experts", (PROMPT[:1], PROMPT), ExpertSharing(PLAIN)),
    ],
)
def test_tokens_that_are_sent_get_the_logits_of_one_rank(name, prompts, sharing):
    whole = Decoder(MODELS[name], torch.float32, seed=1, routing=sharing.routing)
    results, _ = on_data_ranks(MODELS[name], prompts, sharing)
    for prompt, actual in zip(prompts, results, strict=True):
        if prompt:
            torch.testing.assert_close(actual, logits(whole, prompt), rtol=1e-4, atol=1e-4)


def test_a_token_goes_once_to_each_rank_of_its_experts():
    """As the cost model counts copies: 26 tokens that choose 3 of 8 experts on 4 ranks, within 15 % of the mean."""
    ffn = MoEFFN(8, 3, 16)
    model, tokens = tiny((attention(), ffn)), [token % 101 for token in range(26)]
    decoder_batch = [tokens[:13], tokens[13:26], [], []]
    _, sent = on_data_ranks(model, decoder_batch, ExpertSharing(PLAIN))
    for (dispatch, combine), prompt in zip(sent, decoder_batch, strict=True):
        assert len(prompt) <= sum(dispatch) <= 3 * len(prompt)
        assert max(dispatch, default=0) <= len(prompt)
        assert len(combine) == 4
    for rank in range(4):
        assert sent[rank][1] == [own[0][rank] for own in sent]  # as many come back from where they went
    copies = sum(map(sum, (own[0] for own in sent))) / 26
    assert copies == pytest.approx(distinct_ranks(ffn, 4), rel=0.15)


def test_stretches_between_messages_take_as_long_as_the_slowest_rank():
    assert critical_path([RankReply([1, 5, 2], None), RankReply([4, 2, 2], None)]) == 4 + 5 + 2


def scenario(model="gqa", more=(), pools=None, **engine):
    traffic = (
        *("traffic.num_requests=10", "traffic.arrivals.rate=300"),
        "traffic.input_tokens={distribution: uniform, low: 4, high: 40}",
        "traffic.output_tokens={distribution: uniform, low: 1, high: 9}",
    )
    settings = {"max_model_len": 128, "dtype": "float32", "num_gpu_blocks_override": 64} | engine
    overrides = [*traffic, *(f"engine.{name}={value}" for name, value in settings.items()), *more]
    if pools:
        overrides.append("cluster.kv_transfer.bandwidth_bytes_per_s=1e9")
        overrides.append(f"cluster.pools=[{', '.join(f'{{role: {role}}}' for role in pools)}]")
    name = "tiny-moe-cpu" if model == "moe" else "tiny-llama-cpu"
    return load_scenario(name, overrides).model_copy(update={"model": MODELS[model]})


@pytest.fixture
def texts(monkeypatch):
    """All tokens of each request of a run."""
    texts, release = {}, TokenStore.release

    def kept(self, request):
        texts[request.request_id] = list(self.of(request))
        release(self, request)

    monkeypatch.setattr(TokenStore, "release", kept)
    return texts


@pytest.fixture
def sent(monkeypatch):
    """Bytes of each transfer that the first engine sends, which is in this process."""
    sizes, packed = [], KVCache.packed

    def counted(self, blocks):
        result = packed(self, blocks)
        sizes.append(result.nbytes)
        return result

    monkeypatch.setattr(KVCache, "packed", counted)
    return sizes


def same_texts(texts, one, several, **how):
    """The result of `several`, whose texts are those of `one`."""
    texts.clear()
    execute_scenario(one)
    expected = dict(texts)
    texts.clear()
    result = execute_scenario(several, **how)
    assert texts == expected
    assert len(texts) == 10
    return result


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("profile", ["vllm", "trtllm"])
def test_a_decode_engine_goes_on_with_the_kv_of_a_prefill_engine(texts, sent, profile):
    """vLLM's samples the first token again; TensorRT-LLM's begins with the second. A block of 16 tokens has 2 layers
    of keys and values of 2 heads of 8 in 4 bytes."""
    several = scenario(pools=("prefill", "decode"), profile=profile)
    prediction = RunPrediction(several)
    result = same_texts(texts, scenario(profile=profile), several, wrap=prediction.around)
    simulated = simulate(several).summary["kv_transfer"]
    moved = result.summary["kv_transfer"]
    assert moved["transfers"] == simulated["transfers"] > 0
    assert sum(sent) == moved["bytes"] == simulated["bytes"]
    assert len(sent) == moved["transfers"]
    assert all(size % (16 * 2 * 2 * 2 * 8 * 4) == 0 for size in sent)
    assert moved["mean_ms"] > 0
    row = prediction.compare(result).means["mean KV transfer"]
    assert row == (pytest.approx(simulated["mean_ms"] / 1e3), moved["mean_ms"] / 1e3, f"{moved['transfers']} transfers")
    assert {"mean decode step", "mean chunk step"} <= set(prediction.compare(result).means)
    assert sorted(set(result.steps.replica)) == [0, 1]


@pytest.mark.xdist_group("ranks")
def test_prompts_in_the_decode_engines_cache_do_not_move(texts, sent):
    shared = ["traffic.prefix={num_groups: 1, shared_tokens: 32, num_prompts_per_group: 10}", "traffic.arrivals.rate=4"]
    several = scenario(more=shared, pools=("prefill", "decode"))
    result = same_texts(texts, scenario(more=shared), several)
    moved, simulated = result.summary["kv_transfer"], simulate(several).summary["kv_transfer"]
    assert sum(sent) == moved["bytes"] == simulated["bytes"]
    assert sum(sent) < 10 * 3 * 16 * 2 * 2 * 2 * 8 * 4  # not all blocks of all prompts
    assert result.summary["prefix_cache_hit_rate"] > 0.3


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("how", ["experts", "dense", "replicas"])
def test_engines_beside_others_give_the_texts_of_one(texts, how):
    model = "moe" if how == "experts" else "gqa"
    parallel = {"data_parallel_size": 2} if how != "replicas" else {}
    if how == "experts":
        parallel |= {"enable_expert_parallel": "true", "all2all_backend": "flashinfer_all2allv"}
    more = ["cluster.replicas=2"] if how == "replicas" else []
    several = scenario(model, more, **parallel)
    prediction = RunPrediction(several)
    result = same_texts(texts, scenario(model), several, wrap=prediction.around)
    assert "mean decode step" in prediction.compare(result).means
    assert sorted(set(result.steps.replica)) == [0, 1]
    by_start = Counter(result.steps.start_s.tolist())
    assert (max(by_start.values()) == 2) == (how == "experts")  # data-parallel ranks of experts step together


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("think_ms", [0, 50])
@pytest.mark.parametrize("how", ["one", "replicas", "data-parallel", "pools"])
def test_the_next_turn_may_go_to_another_engine(texts, how, think_ms):
    """A turn's prompt begins with the turns before it, whichever engine answered them."""
    turns = "traffic.conversations={turns: {distribution: fixed, value: 3}}"
    users = f"traffic.arrivals={{process: closed_loop, concurrency: 3, think_time_s: {think_ms / 1e3}}}"
    more = [turns, users, "traffic.num_requests=12", *(["cluster.replicas=2"] if how == "replicas" else [])]
    parallel = {"data_parallel_size": 2} if how == "data-parallel" else {}
    pools = ("prefill", "decode") if how == "pools" else None
    result = execute_scenario(scenario(more=[more[1], *more[2:], more[0]], pools=pools, **parallel))
    assert result.summary["completed"] == len(texts) == 12


def test_what_a_device_costs_is_paid_for_each():
    result = execute_scenario(scenario(more=["cluster.replicas=2", "price.usd_per_gpu_hour=3.6"]))
    assert result.summary["usd_total"] == pytest.approx(2 * 1e-3 * result.summary["duration"])


def test_the_step_graph_has_the_exchanges_that_are_executed():
    """Of each layer with experts a dispatch and a combine."""
    engine = EngineSpec(
        data_parallel_size=2, enable_expert_parallel=True, all2all_backend="flashinfer_all2allv", dtype="float32"
    )
    shape = BatchShape(8, 8, (), 8, 80)._replace(group_tokens=16)
    kinds = Counter()
    for node in build_graph(MODELS["moe"], engine).nodes:
        message = node.work(shape).message
        if message is not None:
            kinds[message.kind] += node.count
    experts = sum(isinstance(layer.ffn, MoEFFN) for layer in MODELS["moe"].iter_layers())
    _, sent = on_data_ranks(MODELS["moe"], (PROMPT, PROMPT[:6]), ExpertSharing(PLAIN))
    assert kinds == {"all_to_all": 2 * experts}
    assert all(len(own) == 2 * experts for own in sent)


@pytest.mark.xdist_group("ranks")
def test_an_engine_that_dies_ends_the_run_with_what_was_answered():
    made = []

    def wrap(backend, _):
        made.append(Killing(backend, 12 if not made else 10**6))
        return made[-1]

    several = scenario(more=["traffic.num_requests=40", "traffic.arrivals.rate=30"], pools=("prefill", "decode"))
    result = execute_scenario(several, wrap=wrap)
    assert result.cut_short.startswith("rank 1 of 2 ended")
    assert 0 < result.summary["completed"] < 40
    assert time.monotonic() - made[0].killed_at < 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "moe", "data_parallel_size": 2}, "share experts by their width"),
        ({"more": ["cluster.replicas=2"], "tensor_parallel_size": 2}, "one of its engines has several ranks"),
        ({"pools": ("prefill", "decode"), "more": ["cluster.kv_transfer.layerwise=true"]}, "layer by layer"),
        ({"pools": ("prefill, engine: {block_size: 8}", "decode")}, "blocks of unequal size"),
        (
            {"more": ["cluster.replicas=2"], "speculative_config": "{method: ngram, num_speculative_tokens: 2}"},
            "drafts tokens",
        ),
    ],
)
def test_what_several_engines_do_not_execute_is_refused(change, reason):
    with pytest.raises(PerfmodelError, match=reason) as refused:
        execute_scenario(scenario(**change))
    assert "data_parallel_size and cluster.replicas to 1" in str(refused.value)


def test_steps_of_several_engines_are_not_calibrated():
    with pytest.raises(PerfmodelError, match="has 2 engines, and steps are calibrated for one"):
        validate_executor(scenario(more=["cluster.replicas=2"]))


def test_several_engines_have_no_wall_clock():
    with pytest.raises(PerfmodelError, match="leave out --live"):
        execute_scenario(scenario(more=["cluster.replicas=2"]), live=True)
