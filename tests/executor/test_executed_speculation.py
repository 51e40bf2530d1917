"""Greedy speculation changes which steps there are, not one token: whoever drafts, under any engine, in fp32."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402
from test_backend import alone  # noqa: E402

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, Speculation  # noqa: E402
from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.spec import QuantizationSpec  # noqa: E402
from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel.specs.engine.speculation import Acceptance, MeasuredAcceptance, SpeculativeConfig  # noqa: E402
from perfmodel_executors.backend import ExecutedBackend  # noqa: E402
from perfmodel_executors.clocks import serve  # noqa: E402
from perfmodel_executors.graphs import DecodeGraphs, no_capture  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402
from perfmodel_executors.speculation.build import build_speculator  # noqa: E402
from perfmodel_executors.speculation.lookahead import lookup  # noqa: E402
from perfmodel_executors.speculation.measured import AcceptanceCounts  # noqa: E402
from perfmodel_executors.speculation.pipelined import DraftedAhead, PipelinedProposer  # noqa: E402
from perfmodel_executors.speculation.proposer import Drafting, DraftTree  # noqa: E402
from workloads import BLOCK_SIZE, Case, cases  # noqa: E402

DECODERS = {name: Decoder(MODELS[name], torch.float32, seed=1) for name in ("gqa", "window", "moe")}
DECODERS["int8"] = Decoder(
    replace(MODELS["gqa"], dtype="fp32", quantization=QuantizationSpec(kv_cache="int8")), torch.float32, seed=1
)
OTHER = Decoder(MODELS["gqa"], torch.float32, seed=2)  # of the same vocabulary; nearly always wrong
METHODS = {
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1),
    "itself": SpeculativeConfig(method="draft_model", model=MODELS["gqa"], num_speculative_tokens=3),
    "another": SpeculativeConfig(method="draft_model", model=MODELS["gqa"], num_speculative_tokens=4),
    "skip": SpeculativeConfig(method="self_skip", draft_layers=1, num_speculative_tokens=3),
    "quantized": SpeculativeConfig(method="self_quantized", quantization="w8a16", num_speculative_tokens=2),
    "medusa": SpeculativeConfig(method="medusa", num_speculative_tokens=3),
    "medusa in a tree": SpeculativeConfig(method="medusa", tree=(3, 2, 1)),
    "eagle": SpeculativeConfig(method="eagle", num_speculative_tokens=3),
    "eagle in a tree": SpeculativeConfig(method="eagle", tree=(2, 2, 1)),
    "lookahead": SpeculativeConfig(method="lookahead", lookahead={"window": 3, "ngram": 4, "guesses": 3}),
    "itself ahead": SpeculativeConfig(
        method="draft_model", model=MODELS["gqa"], num_speculative_tokens=3, pipelined=True, has_own_device=True
    ),
    "another ahead": SpeculativeConfig(
        method="draft_model", model=MODELS["gqa"], num_speculative_tokens=3, pipelined=True, has_own_device=True
    ),
    "itself in a tree": SpeculativeConfig(method="draft_model", model=MODELS["gqa"], tree=(3, 2, 1)),
    "skip in a tree": SpeculativeConfig(method="self_skip", draft_layers=1, tree=(2, 2, 2)),
}
WITHOUT_SPANS = ["gqa", "moe", "int8"]


def served(decoder, case_config, num_blocks, requests, method, has_prefix_cache=True, is_ahead=False, capture=None):
    """Outputs by request, and the backend, of an engine that drafts as METHODS[method] says; capture: by graphs."""
    config = METHODS[method]
    engine = EngineSpec(speculative_config=config, block_size=BLOCK_SIZE)
    draft = OTHER if method.startswith("another") else decoder if method.startswith("itself") else None
    runner = StepRunner(decoder, decoder.new_cache(BLOCK_SIZE))
    if capture is not None:
        cache = decoder.new_cache(BLOCK_SIZE, num_blocks + 1)
        runner = StepRunner(decoder, cache, DecodeGraphs(decoder, cache, num_blocks, 8, 256, capture))
    speculator = build_speculator(runner, engine, draft)
    backend = ExecutedBackend(runner, warms_up=False, speculator=speculator)
    scheduling = replace(
        case_config,
        record_positions=True,
        spans=(),
        speculation=Speculation(
            config.nodes_by_depth, pipelined=config.pipelined, past_end=is_ahead, is_ahead=is_ahead
        ),
    )
    loop = ServeLoop(Scheduler(scheduling, KVBlockManager(num_blocks, BLOCK_SIZE, has_prefix_cache)), is_ahead)
    outputs = {}

    def on_finished(request):
        outputs[request.request_id] = backend.tokens.outputs(request)
        if not is_ahead:  # else the next step may have been planned for it
            backend.release(request)

    serve(loop, backend, requests, on_finished)
    assert len(outputs) == len(requests)
    return outputs, backend, loop


@pytest.mark.parametrize("method", ["ngram", "itself", "another", "skip", "quantized"])
@pytest.mark.parametrize("name", ["gqa", "int8"])
def test_drafts_and_what_verifies_them_run_as_graphs(name, method, monkeypatch):
    """All but the prompts, which are one step, of the model and of what drafts; the tokens are those without drafts."""
    decoder, eager, step = DECODERS[name], [], Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *arguments: (eager.append(1), step(*arguments))[1])
    config = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=64, block_size=BLOCK_SIZE)
    rows = [(i, 0, 3 + 2 * i, 9 + i) for i in range(5)]
    outputs, _, _ = served(decoder, config, 60, [Request(*row) for row in rows], method, capture=no_capture)
    assert len(eager) <= 2
    assert outputs == {row[0]: alone(decoder, Request(*row)) for row in rows}


@st.composite
def executed_cases(draw):
    case = draw(cases(max_requests=6))
    rows = tuple((arrival, prompt, min(output, 20), *rest) for arrival, prompt, output, *rest in case.rows)
    num_blocks = max(case.num_blocks, 48)  # a tree's nodes come on top of the longest sequence
    return replace(case, rows=rows, rolling_span=None, num_blocks=num_blocks)


@pytest.mark.release
@given(executed_cases(), st.sampled_from(sorted(METHODS)), st.sampled_from(sorted(DECODERS)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_tokens_are_those_of_the_request_alone_without_drafts(
    case: Case, method: str, name: str, is_ahead: bool
) -> None:
    """All batching disciplines, chunked and shared prompts, preemption, KV in int8; also planned ahead."""
    if (METHODS[method].tree or METHODS[method].lookahead) and name not in WITHOUT_SPANS:
        name = "gqa"
    decoder = DECODERS[name]
    is_ahead &= not METHODS[method].pipelined
    requests, has_cache = case.requests(), case.has_prefix_cache
    outputs, _, _ = served(decoder, case.config, case.num_blocks, requests, method, has_cache, is_ahead)
    for request in case.requests():
        assert outputs[request.request_id] == alone(decoder, request)


AHEAD = [False, True]


@pytest.mark.release
@pytest.mark.parametrize("is_ahead", AHEAD)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_preempted_requests_draft_on_to_the_same_tokens(method, is_ahead):
    is_ahead &= not METHODS[method].pipelined
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40, block_size=BLOCK_SIZE)
    requests = [Request(i, 0, 10, 24) for i in range(4)]
    outputs, _, loop = served(DECODERS["gqa"], config, 17, requests, method, is_ahead=is_ahead)
    assert loop.scheduler.num_preemptions > 0
    assert outputs == {r.request_id: alone(DECODERS["gqa"], r) for r in requests}


@pytest.mark.parametrize(
    ("method", "is_ahead"),
    [("itself", False), ("itself", True), ("itself ahead", False), ("itself in a tree", False)],
)
def test_a_drafter_that_is_the_model_is_always_right(method, is_ahead):
    """Also behind prefixes that only another request has computed, so its KV is what the model's would be."""
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, block_size=BLOCK_SIZE)
    shared = tuple(("prefix", i) for i in range(5))
    requests = [Request(i, i * 10**9, 23 + i, 17, shared) for i in range(4)]
    _, backend, loop = served(DECODERS["gqa"], config, 100, requests, method, is_ahead=is_ahead)
    assert loop.scheduler.num_prefix_tokens_hit > 0
    assert backend.acceptance.accepted == backend.acceptance.examined
    assert backend.acceptance.mean_length > 3


def test_counts_are_conditional_by_depth_and_read_back(tmp_path):
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, block_size=BLOCK_SIZE)
    requests = [Request(i, 0, 23 + i, 20) for i in range(3)]
    _, backend, _ = served(DECODERS["gqa"], config, 100, requests, "skip in a tree")
    counts = backend.acceptance
    assert all(later <= earlier for later, earlier in zip(counts.examined[1:], counts.accepted, strict=False))
    counts.write(tmp_path / "acceptance.json")
    measured = MeasuredAcceptance.read(tmp_path / "acceptance.json")
    assert list(measured.rates) == counts.rates
    assert [sum(ranks) for ranks in measured.by_rank] == counts.accepted


def test_steps_without_an_n_gram_are_counted_apart(tmp_path):
    """They count as wrong, and had nothing to verify: offered lies between what was right first and all steps."""
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, block_size=BLOCK_SIZE)
    asked = [[Request(i, 0, 23 + i, 20) for i in range(3)] for _ in range(2)]
    _, backend, _ = served(DECODERS["gqa"], config, 100, asked[0], "ngram")
    counts = backend.acceptance
    assert counts.accepted[0] <= counts.num_offered < counts.num_steps == counts.examined[0]
    counts.write(tmp_path / "acceptance.json")
    read = Acceptance(measured=str(tmp_path / "acceptance.json"))
    assert read.share_offered == counts.acceptance().offered == counts.num_offered / counts.num_steps
    _, drafted, _ = served(DECODERS["gqa"], config, 100, asked[1], "another")
    assert drafted.acceptance.acceptance().offered == 1.0  # a drafter that is a model has always something to say


def test_lookup_takes_the_longest_suffix_at_its_earliest_place():
    text = [7, 1, 2, 3, 9, 1, 2, 3, 8, 2, 3, 5, 1, 2, 3]
    assert lookup(text, 3, 1, 2) == [9, 1]
    assert lookup(text, 4, 2, 5) == [9, 1, 2, 3, 8]
    assert lookup(text, 2, 2, 1) == [9]
    assert lookup([1, 2, 3, 4], 3, 1, 4) == []
    assert lookup([5, 5], 5, 1, 3) == [5]
    assert lookup([256, 1, 65536, 1], 1, 1, 1) == [65536]  # ids are matched whole, not their bytes


def test_a_tree_counts_its_nodes_by_depth():
    tree = DraftTree((2, 2, 1))
    assert tree.parents == [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    assert tree.depths == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert tree.path(9) == [2, 5, 9]
    assert [tree.rank(node) for node in tree.path(9)] == [1, 0, 0]
    assert tree.ancestors[9] == 1 | 1 << 2 | 1 << 5 | 1 << 9
    assert [tree.levels[depth].stop - 1 for depth in range(4)] == list(
        SpeculativeConfig(method="self_skip", draft_layers=1, tree=(2, 2, 1)).nodes_by_depth
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "lookahead", "lookahead": {}}, "window=15, ngram=5 and guesses=15 has 120 nodes, and 64 are"),
        ({"method": "self_skip", "draft_layers": 2, "num_speculative_tokens": 2}, "draft_layers=2, but .* has 2"),
        ({"method": "self_skip", "draft_layers": 1, "tree": (8, 8)}, "has 73 nodes, and 64 are executed at most"),
        (
            {"method": "draft_model", "model": replace(MODELS["gqa"], vocab_size=7), "num_speculative_tokens": 2},
            "has 7 tokens and test-model 101",
        ),
    ],
)
def test_what_is_not_executed_is_said_in_a_sentence(changes, message):
    decoder = DECODERS["gqa"]
    engine = EngineSpec(speculative_config=SpeculativeConfig(**changes))
    with pytest.raises(PerfmodelError, match=message):
        build_speculator(StepRunner(decoder, decoder.new_cache(BLOCK_SIZE)), engine)


def test_a_tree_needs_layers_that_see_everything_and_one_device():
    decoder = DECODERS["window"]
    engine = EngineSpec(speculative_config=METHODS["skip in a tree"])
    with pytest.raises(PerfmodelError, match="see a window or chunk only"):
        build_speculator(StepRunner(decoder, decoder.new_cache(BLOCK_SIZE)), engine)
    engine = EngineSpec(speculative_config=METHODS["skip"], tensor_parallel_size=2)
    with pytest.raises(PerfmodelError, match="executed on one device"):
        build_speculator(StepRunner(decoder, decoder.new_cache(BLOCK_SIZE)), engine)


def test_a_drafter_in_a_thread_of_its_own_makes_a_step_as_long_as_the_longer_of_both():
    """Half a second of the drafter's thread beside a step of the model: the clock has not seen what is beyond."""
    config = METHODS["itself ahead"]
    decoder = DECODERS["gqa"]
    runner = StepRunner(decoder, decoder.new_cache(BLOCK_SIZE))
    speculator = build_speculator(runner, EngineSpec(speculative_config=config, block_size=BLOCK_SIZE), decoder)
    proposer, table = speculator.proposer, list(range(8))
    runner.cache.reserve(8)
    proposer.reserve_for([table])
    [[token]] = speculator.run([], [TokenSegment([5, 7, 9], 0, table)]).tokens
    drafting = [Drafting(0, [5, 7, 9, token], table, 0, ahead=speculator.ahead)]
    drafted = proposer._go_on(drafting, [[]], ())
    assert len(drafted.tokens[0]) == 1 + config.depth
    quick = speculator.run(drafting, [])
    assert quick.guessed == [True]  # the drafter is the model
    assert quick.num_accepted == [1]
    proposer.go_on = lambda *asked: _done(DraftedAhead(drafted.tokens, 500_000_000))
    assert 0.4e9 < speculator.run(drafting, []).waited_ns <= 0.5e9
    proposer.go_on = lambda *asked: _done(DraftedAhead(drafted.tokens, 0))
    assert speculator.run(drafting, []).waited_ns == 0


def _done(result):
    future = Future()
    future.set_result(result)
    return future


def test_a_drafter_ahead_is_judged_by_its_guesses_too():
    """A guess counts where it was asked for and all before it was right; it brings no token."""
    counts = AcceptanceCounts(DraftTree((1, 1)))
    counts.add(0, [], 0, True)
    counts.add(2, [1, 2], 2, False)
    counts.add(2, [1], 2, None)
    assert (counts.examined, counts.accepted) == ([3, 3], [3, 1])
    assert counts.mean_length == 1 + 3 / 2
    assert counts.acceptance().offered == 1.0
    assert counts.measured().offered is None


def test_a_drafter_ahead_computes_nothing_twice(monkeypatch):
    """Each first pass has one token of a sequence: what lay behind its last block was copied when it got more."""
    lengths, first = [], PipelinedProposer._first

    def recorded(self, index, drafting, draft):
        segment = first(self, index, drafting, draft)
        lengths.append(len(segment.tokens))
        return segment

    monkeypatch.setattr(PipelinedProposer, "_first", recorded)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, block_size=BLOCK_SIZE)
    _, backend, _ = served(DECODERS["gqa"], config, 100, [Request(i, 0, 9 + i, 30) for i in range(2)], "itself ahead")
    assert backend.acceptance.accepted == backend.acceptance.examined
    assert set(lengths) == {1}


def test_of_a_tree_the_path_is_kept_that_the_target_would_have_taken():
    parents = [-1, 0, 0, 1, 1, 2, 5]
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6]] * 5)
    chosen = torch.tensor(
        [
            [1, 4, 0, 0, 0, 0, 0],  # 1, then 4
            [2, 3, 5, 0, 0, 6, 8],  # 2, 5, 6
            [7, 3, 5, 0, 0, 6, 8],  # nothing
            [1, 5, 5, 0, 0, 6, 8],  # 1 only
            [2, 3, 5, 0, 0, 6, 8],  # as the second, but the last two were not drafted
        ]
    )
    last = load_kernels().verify_greedy(tokens, parents, chosen, torch.tensor([7, 7, 7, 7, 5]))
    assert last.tolist() == [4, 6, 0, 1, 2]
