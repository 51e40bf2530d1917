"""Decode steps padded to captured sizes give the tokens of unpadded ones. Nothing is captured here."""

from dataclasses import replace
from itertools import accumulate

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402
from test_backend import alone  # noqa: E402

from perfmodel.engine import (  # noqa: E402
    KVBlockManager,
    Request,
    Scheduler,
    SchedulerConfig,
    ServeLoop,
)
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel_executors.backend import ExecutedBackend  # noqa: E402
from perfmodel_executors.clocks import serve  # noqa: E402
from perfmodel_executors.graphs import (  # noqa: E402
    ChunkInputs,
    ChunkSizes,
    DecodeGraphs,
    DecodeInputs,
    capture_sizes,
    no_capture,
    padded_size,
)
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.runner import RunnerSetup, StepRunner, build_runner  # noqa: E402
from workloads import BLOCK_SIZE  # noqa: E402

NUM_BLOCKS = 40


def test_sizes_are_those_that_vllm_captures():
    """vLLM's default for 512 sequences: [1, 2, 4, 8, 16, 24, ..., 248, 256, 272, ..., 512]."""
    sizes = capture_sizes(512)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-3:] == (480, 496, 512)
    assert sizes[sizes.index(248) : sizes.index(248) + 3] == (248, 256, 272)
    assert len(sizes) == 51
    assert capture_sizes(1) == (1,)
    assert capture_sizes(20)[-1] == 24
    assert capture_sizes(4096)[-1] == 512
    assert [padded_size(n, (1, 2, 4, 8)) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]


class Recorder:
    """Captures nothing; keeps the addresses that each replay reads, and how often each is replayed."""

    def __init__(self):
        self.num_captures, self.num_replays = 0, 0

    def __call__(self, compute):
        self.num_captures += 1

        def replay():
            self.num_replays += 1
            return compute()

        return replay


def graphed(decoder, max_num_seqs=8, max_context=64, capture=None, most_with_prompts=0):
    cache = decoder.new_cache(BLOCK_SIZE, NUM_BLOCKS + 1)
    limits = (NUM_BLOCKS, max_num_seqs, max_context)
    graphs = DecodeGraphs(decoder, cache, *limits, capture or Recorder(), most_with_prompts)
    return StepRunner(decoder, cache, graphs)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_served_with_graphs_each_request_has_the_tokens_it_has_alone(name):
    decoder, capture = Decoder(MODELS[name], torch.float32, seed=1), Recorder()
    config = SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=32, block_size=BLOCK_SIZE, record_positions=True)
    loop = ServeLoop(Scheduler(config, KVBlockManager(NUM_BLOCKS, BLOCK_SIZE)))
    requests = [Request(i, i * 20, 3 + 2 * i, 4 + i) for i in range(9)]
    runner = graphed(decoder, capture=capture)
    ticks = iter(range(10**9))
    backend = ExecutedBackend(runner, clock_ns=lambda: next(ticks), warms_up=False)
    finished, steps = [], []
    serve(loop, backend, requests, finished.append, steps.append)
    outputs = {request.request_id: backend.tokens.outputs(request) for request in finished}
    assert outputs == {r.request_id: alone(decoder, r) for r in requests}
    assert capture.num_replays == sum(step.num_chunks == 0 for step in steps) > 0
    assert capture.num_captures <= len(capture_sizes(7))


def prefilled(decoder, runner, lengths, room=0):
    """Sequences of random tokens in the runner's cache, with blocks for `room` more, and each one's next segment."""
    generator, blocks, segments = torch.Generator().manual_seed(5), iter(range(NUM_BLOCKS)), []
    with torch.inference_mode():
        for length in lengths:
            tokens = torch.randint(101, (length,), generator=generator).tolist()
            table = [next(blocks) for _ in range(-(-(length + room) // BLOCK_SIZE))]
            if length > 1:
                decoder.step(build_batch([TokenSegment(tokens[:-1], 0, table)], BLOCK_SIZE), runner.cache)
            segments.append(TokenSegment(tokens[-1:], length - 1, table))
    return segments


def test_padding_rows_touch_nothing_but_the_scratch_block():
    decoder = Decoder(MODELS["gqa"], torch.float32, seed=1)
    runner = graphed(decoder)
    segments = prefilled(decoder, runner, (1, 9, 30))
    before = [(pages.k_BSKH.clone(), pages.v_BSKH.clone()) for pages in runner.cache.pages]
    runner.run(segments)
    written = {segment.block_table[segment.num_computed // BLOCK_SIZE] for segment in segments}
    untouched = [block for block in range(NUM_BLOCKS) if block not in written]
    for (k, v, *_), (old_k, old_v) in zip(runner.cache.pages, before, strict=True):
        assert torch.equal(k[untouched], old_k[untouched])
        assert torch.equal(v[untouched], old_v[untouched])
        assert not torch.equal(k[NUM_BLOCKS], old_k[NUM_BLOCKS])


def chunked(segments, lengths, is_verified):
    """The segments with so many new tokens, of their own sequences."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [
        segment._replace(
            tokens=[*segment.tokens, *torch.randint(101, (length - 1,), generator=generator).tolist()],
            is_verified=is_verified and length > 1,
        )
        for segment, length in zip(segments, lengths, strict=True)
    ]


@pytest.mark.parametrize("is_verified", [True, False])
@pytest.mark.parametrize("name", ["gqa", "window", "chunks", "moe"])
def test_steps_of_chunks_padded_to_captured_sizes_give_the_tokens_of_unpadded_ones(name, is_verified):
    """Of one graph after another, of more, fewer and other sequences; none remembers what filled it before."""
    decoder, capture = Decoder(MODELS[name], torch.float32, seed=1), Recorder()
    runner = graphed(decoder, capture=capture, most_with_prompts=64)
    segments = prefilled(decoder, runner, (3, 9, 17, 5, 12), room=3)
    alone_runner = StepRunner(decoder, runner.cache)
    steps = [((0, 1, 2, 3), (3, 1, 4, 1)), ((0, 1, 2, 4), (3, 3, 1, 3)), ((3, 4), (4, 4)), ((2, 0, 1), (1, 2, 4))]
    for rows, lengths in [*steps, *steps[::-1]]:
        step = chunked([segments[row] for row in rows], lengths, is_verified)
        assert runner.graphs.can_run(step)
        tokens = runner.run(step)
        assert tokens == alone_runner.run(step)
        assert len(tokens) == (sum(lengths) if is_verified else len(lengths))
    assert capture.num_replays == 2 * len(steps)
    assert capture.num_captures < 2 * len(steps)


def test_starts_of_padded_chunks_rise_to_the_last_token():
    """Kernels find a chunk of a tile by bisection: those that pad lie behind all others, the first has what is left."""
    inputs = ChunkInputs(ChunkSizes(4, 16, 2, 8, 4), BLOCK_SIZE, NUM_BLOCKS, torch.device("cpu"), is_drawn=False)
    for lengths in ((3, 1, 5), (2, 2), (7, 1, 1)):
        inputs.fill([TokenSegment([1] * length, 0, [row] * 4) for row, length in enumerate(lengths)])
        ends = list(accumulate([length for length in lengths if length > 1], initial=0))
        assert inputs.batch.chunks.starts_G.tolist() == [*ends, *[16] * (5 - len(ends))]


def test_padding_of_chunks_touches_nothing_but_the_scratch_block():
    decoder = Decoder(MODELS["gqa"], torch.float32, seed=1)
    runner = graphed(decoder)
    segments = prefilled(decoder, runner, (3, 9, 30), room=4)
    for lengths in ((2, 5, 4), (1, 2, 1)):
        before = [(pages.k_BSKH.clone(), pages.v_BSKH.clone()) for pages in runner.cache.pages]
        step = chunked(segments, lengths, is_verified=True)
        runner.run(step)
        written = {
            (s.block_table[place // BLOCK_SIZE], place % BLOCK_SIZE)
            for s in step
            for place in range(s.num_computed, s.num_computed + len(s.tokens))
        }
        for pages, olds in zip(runner.cache.pages, before, strict=True):
            for new, old in zip(pages[:2], olds, strict=True):
                changed = (new != old).flatten(2).any(-1).nonzero().tolist()
                assert {(block, place) for block, place in changed if block != NUM_BLOCKS} <= written


def test_prompts_are_steps_of_chunks_up_to_what_the_rules_say():
    decoder, capture = Decoder(MODELS["gqa"], torch.float32, seed=1), Recorder()
    runner = graphed(decoder, capture=capture, most_with_prompts=8)
    (segment,) = prefilled(decoder, runner, (1,), room=8)
    for length, num_replays in ((8, 1), (9, 1), (5, 2)):
        assert len(runner.run(chunked([segment], [length], is_verified=False))) == 1
        assert capture.num_replays == num_replays
    assert not graphed(decoder).graphs.can_run(chunked([segment], [5], is_verified=False))
    assert graphed(decoder).graphs.can_run(chunked([segment], [5], is_verified=True))


def test_inputs_stay_where_they_are_and_forget_the_step_before():
    decoder = Decoder(MODELS["window"], torch.float32, seed=1)
    runner = graphed(decoder)
    segments = prefilled(decoder, runner, (17, 3, 30, 8, 12))
    addresses = {name: getattr(runner.graphs._inputs.batch(8), name).data_ptr() for name in ("tokens_T", "tables_DM")}
    everyone = runner.run(segments)
    assert runner.run(segments[::-1]) == everyone[::-1]
    assert runner.run(segments[3:]) == everyone[3:]
    assert [runner.run([segment])[0] for segment in segments] == everyone
    with torch.inference_mode():
        eager = decoder.step(build_batch(segments, BLOCK_SIZE), runner.cache)
    assert everyone == eager
    for name, address in addresses.items():
        assert getattr(runner.graphs._inputs.batch(8), name).data_ptr() == address


def test_block_tables_are_sent_when_they_change():
    decoder = Decoder(MODELS["gqa"], torch.float32)
    inputs = DecodeInputs(8, 16, BLOCK_SIZE, NUM_BLOCKS, decoder.device)
    tables = [[3, 1], [7], [9, 2, 4]]
    segments = [TokenSegment([5], BLOCK_SIZE * len(table) - 2, table) for table in tables]
    assert inputs.fill(segments, 4) == 4
    assert inputs.fill(segments, 4) == 0
    tables[1].append(8)  # the sequence's own list, which has grown in place
    assert inputs.fill(segments, 4) == 1
    assert inputs.fill(segments[:2], 2) == 0
    assert inputs.fill([segments[2], segments[1]], 2) == 1
    tables[1][0] = 6  # preempted, and given other blocks
    assert inputs.fill([segments[2], segments[1]], 2) == 1
    batch = inputs.batch(4)
    assert batch.tables_DM[0, :3].tolist() == [9, 2, 4]
    assert batch.tables_DM[1, :2].tolist() == [6, 8]
    assert batch.tables_DM[3, :1].tolist() == [NUM_BLOCKS]
    assert batch.slots_T[:2].tolist() == [4 * BLOCK_SIZE + BLOCK_SIZE - 2, 6 * BLOCK_SIZE + BLOCK_SIZE - 2]


def test_pools_of_graphs_hold_what_the_engine_may_hand_out_and_eager_engines_have_none():
    engine = EngineSpec(dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=7, max_model_len=64)
    setup = RunnerSetup(MODELS["gqa"], engine, NUM_BLOCKS, torch.device("cpu"))
    runner = build_runner(setup, capture=no_capture)
    assert runner.cache.num_blocks == NUM_BLOCKS + 1
    assert runner.graphs.sizes == (1, 2, 4, 8)
    eager = build_runner(replace(setup, engine=engine.model_copy(update={"enforce_eager": True})), capture=no_capture)
    assert eager.graphs is None
    assert build_runner(setup).graphs is None  # a CPU captures nothing, and its pool grows
    assert build_runner(setup).cache.num_blocks == 0


def test_what_no_graph_holds_runs_eagerly():
    decoder, capture = Decoder(MODELS["gqa"], torch.float32, seed=1), Recorder()
    runner = graphed(decoder, max_num_seqs=2, max_context=8, capture=capture)
    segments = prefilled(decoder, runner, (4, 5, 6, 20))
    assert len(runner.run(segments[:3])) == 3  # more than were captured
    assert len(runner.run(segments[3:])) == 1  # a table longer than the graph's
    assert len(runner.run([TokenSegment([1, 2], 0, [30])])) == 1  # a prompt
    assert runner.run([segments[0]._replace(is_sampled=False)]) == []
    assert capture.num_replays == 0
    assert len(runner.run(segments[:2])) == 2
    assert capture.num_replays == 1
