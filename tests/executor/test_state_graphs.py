"""Graphs of decodes with recurrent layers: which row of states a sequence has is an input, and nothing else moves."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import attention, tiny  # noqa: E402
from test_backend import alone  # noqa: E402
from test_graphs import NUM_BLOCKS, Recorder, graphed, prefilled  # noqa: E402

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop  # noqa: E402
from perfmodel.models.architecture import DenseFFN, GatedDeltaNet, LinearAttention, Mamba  # noqa: E402
from perfmodel_executors.backend import ExecutedBackend  # noqa: E402
from perfmodel_executors.clocks import serve  # noqa: E402
from perfmodel_executors.graphs import DecodeGraphs  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.models.support import check_capturable  # noqa: E402
from workloads import BLOCK_SIZE  # noqa: E402

MAMBA = Mamba(num_heads=4, head_dim=8, state_size=8, num_groups=2, conv_kernel=4, chunk_size=8)
DELTA_NET = GatedDeltaNet(2, 4, 8, 8, 4)
PERFORMER = LinearAttention(num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, kind="performer", size=16)
RECURRENT = {
    "mamba": tiny((MAMBA, DenseFFN(48)), (attention(), DenseFFN(48))),
    "delta-net": tiny((DELTA_NET, DenseFFN(48)), (attention(), DenseFFN(48))),
    "performer": tiny((PERFORMER, DenseFFN(48)), (attention(), DenseFFN(48))),
}


@pytest.fixture(params=sorted(RECURRENT))
def decoder(request):
    return Decoder(RECURRENT[request.param], torch.float32, seed=1)


def addresses(cache):
    return [tensor.data_ptr() for layer in cache.states.layers.values() for tensor in layer]


def states_of(cache, segments):
    rows = [cache.states._rows[segment.block_table[0]] for segment in segments]
    return [tensor[rows].clone() for layer in cache.states.layers.values() for tensor in layer]


def test_a_replay_does_to_states_what_an_eager_step_does(decoder):
    """Equal tokens, equal states; of other rows the scratch one alone is written to, though five pad to eight."""
    check_capturable(decoder.model, "flash")
    runner = graphed(decoder)
    segments = prefilled(decoder, runner, (17, 3, 30, 8, 12))
    before, places = states_of(runner.cache, segments), addresses(runner.cache)
    kept = [tensor.clone() for layer in runner.cache.states.layers.values() for tensor in layer]
    with torch.inference_mode(), runner.cache.restored([segment.block_table for segment in segments]):
        eager = decoder.step(build_batch(segments, BLOCK_SIZE), runner.cache)
        expected = states_of(runner.cache, segments)
    assert runner.run(segments) == eager
    for ours, theirs, old in zip(states_of(runner.cache, segments), expected, before, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not ours.numel() or not torch.equal(ours, old)
    rows = {runner.cache.states._rows[segment.block_table[0]] for segment in segments} | {runner.graphs._scratch_row}
    others = [row for row in range(runner.cache.states.num_rows) if row not in rows]
    now = [tensor for layer in runner.cache.states.layers.values() for tensor in layer]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(now, kept, strict=True))
    assert addresses(runner.cache) == places


def test_a_warm_up_by_a_graph_takes_no_token_in(decoder):
    runner = graphed(decoder)
    segments = prefilled(decoder, runner, (9, 5))
    before = states_of(runner.cache, segments)
    first = runner.run(segments, is_warm_up=True)
    assert all(map(torch.equal, before, states_of(runner.cache, segments)))
    assert runner.run(segments) == first


def test_more_sequences_than_there_are_rows_are_captured_anew(decoder):
    """An engine has no more running than graphs are made for; whoever has, finds no graph of tensors that are gone."""
    capture = Recorder()
    runner = graphed(decoder, max_num_seqs=2, capture=capture)
    segments = prefilled(decoder, runner, (4, 5))
    runner.run(segments)
    places = addresses(runner.cache)
    more = [segment._replace(block_table=[20 + i]) for i, segment in enumerate(prefilled(decoder, runner, (1, 1, 1)))]
    for segment in more:
        runner.run([segment])
    assert addresses(runner.cache) != places
    done = capture.num_captures
    runner.run(segments)
    assert capture.num_captures == done + 1


def test_what_is_captured_asks_the_host_nothing():
    """On the meta device tensors have shapes and no values: whatever looked at one would fail."""
    decoder = Decoder(tiny((MAMBA, DenseFFN(48))), torch.float32, device=torch.device("meta"))
    cache, captured = decoder.new_cache(BLOCK_SIZE, NUM_BLOCKS + 1), []

    def capture(compute):
        captured.append(compute().shape)
        return lambda: torch.zeros(captured[-1], dtype=torch.int64)

    graphs = DecodeGraphs(decoder, cache, NUM_BLOCKS, 4, 64, capture)
    assert graphs.run([TokenSegment([1], 4, [0, 1]), TokenSegment([2], 0, [2]), TokenSegment([3], 2, [3])]) == [0] * 3
    assert captured == [(4,)]


def test_finished_and_preempted_sequences_leave_their_rows(decoder):
    """Twelve requests in a pool for four sequences, some of which are preempted: rows for those, and one that pads. No
    block stays for who comes back: its state is gone."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, block_size=BLOCK_SIZE, record_positions=True)
    loop = ServeLoop(Scheduler(config, KVBlockManager(12, BLOCK_SIZE, enable_prefix_caching=False)))
    runner, ticks, outputs, steps = graphed(decoder, max_num_seqs=4), iter(range(10**9)), {}, []
    backend = ExecutedBackend(runner, clock_ns=lambda: next(ticks), warms_up=False)
    requests = [Request(i, i * 5, 3 + i, 12) for i in range(12)]

    def on_finished(request):
        outputs[request.request_id] = backend.tokens.outputs(request)
        backend.release(request)

    expected = {request.request_id: alone(decoder, request) for request in requests}
    serve(loop, backend, requests, on_finished, steps.append)
    assert loop.scheduler.num_preemptions
    assert outputs == expected
    assert runner.cache.states.num_rows == 5
    assert not runner.cache.states._rows
