"""Tiles are chosen by a margin, at contexts that a run has, and what was chosen is written down."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel_executors.graphs import TUNED_CONTEXT, DecodeGraphs, stand_ins  # noqa: E402
from perfmodel_executors.kernels import tiles  # noqa: E402
from perfmodel_executors.kernels.launch import Options  # noqa: E402
from perfmodel_executors.kernels.tiles import DeviceLimits, TileConfig  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402

BLOCK = 4
CANDIDATES = [TileConfig({"TILE": size}, Options(4, 2)) for size in (64, 128, 32)]


def pick(monkeypatch, times_ms, problem):
    """What is chosen on a GPU on which the candidates take so long."""
    monkeypatch.setattr(tiles, "_milliseconds", lambda run, config: times_ms[CANDIDATES.index(config)])
    monkeypatch.setattr(tiles, "_limits_of", lambda device: DeviceLimits("Some GPU", 90, 232448))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with tiles.tuning():
        return tiles.pick(
            "k", problem, lambda: CANDIDATES, lambda config, capability: 0, lambda config: None, torch.device("cuda")
        )


@pytest.mark.parametrize(
    ("times_ms", "chosen"),
    [((1.0, 0.98, 1.2), 0), ((1.0, 0.96, 1.2), 1), ((1.0, 0.96, 0.5), 2), ((float("inf"), 0.9, 0.91), 1)],
)
def test_another_tile_is_taken_where_it_is_faster_by_more_than_timings_differ(monkeypatch, times_ms, chosen):
    monkeypatch.setattr(tiles, "_chosen", {})
    assert pick(monkeypatch, times_ms, "p") == CANDIDATES[chosen]
    assert pick(monkeypatch, (0.0, 9.0, 9.0), "p") == CANDIDATES[chosen]  # kept for the process


def test_tuning_ends_and_is_left_out_where_it_must(monkeypatch):
    """A candidate that takes longer than all may is the last one to be timed; without tuning there is no first."""
    monkeypatch.setattr(tiles, "_chosen", {})
    monkeypatch.setattr(tiles, "_MAX_TUNING_S", -1.0)
    assert pick(monkeypatch, (1.0, 0.5, 0.5), "p") == CANDIDATES[0]
    assert "64" in next(iter(tiles.choices().values()))
    monkeypatch.setattr(tiles, "_MAX_TUNING_S", 1e9)
    with tiles.untuned():
        assert pick(monkeypatch, (1.0, 0.5, 0.5), "q") == CANDIDATES[0]
    assert pick(monkeypatch, (1.0, 0.5, 0.5), "q") == CANDIDATES[1]


def test_what_was_chosen_says_what_the_others_took(monkeypatch):
    monkeypatch.setattr(tiles, "_chosen", {})
    pick(monkeypatch, (0.050, 0.040, 0.060), "p")
    (line,) = tiles.choices().values()
    assert line.startswith("TILE=128")
    for time in ("50.0 us", "40.0 us", "60.0 us"):
        assert time in line


def test_graphs_are_captured_at_contexts_that_do_not_depend_on_the_first_batch():
    """The first batch of a run has short contexts, and padding of one token; tiles chosen on these serve all others."""
    decoder, seen = Decoder(MODELS["moe"], torch.float32), []
    cache = decoder.new_cache(BLOCK, 41)

    def capture(compute):
        batch = graphs._inputs.batch(4)
        seen.append((batch.contexts_D.tolist(), batch.tokens_T.tolist()))
        with torch.inference_mode():
            compute()
        return compute

    graphs = DecodeGraphs(decoder, cache, 40, 4, 64, capture)
    before = [pages.k_BSKH[:40].clone() for pages in cache.pages]
    with torch.inference_mode():
        graphs.run([TokenSegment([1], 0, [0]), TokenSegment([2], 0, [1]), TokenSegment([3], 0, [2])])
    ((contexts, tokens),) = seen
    assert contexts == [40] * 4  # a quarter each of the pool's 160 tokens
    assert len(set(tokens)) == 4
    for pages, old in zip(cache.pages, before, strict=True):
        assert torch.equal(pages.k_BSKH[3:40], old[3:])


@pytest.mark.parametrize(
    ("size", "max_context", "expected"), [(1, 131072, TUNED_CONTEXT), (1, 512, 512), (64, 4096, 256)]
)
def test_stand_ins_are_as_long_as_contexts_and_the_pool_allow(size, max_context, expected):
    """1,024 blocks of 16 tokens."""
    segments = stand_ins(size, 1000, 16, 1024, max_context)
    assert [segment.num_computed + 1 for segment in segments] == [expected] * size
    assert all(len(segment.block_table) == expected // 16 for segment in segments)
    assert all(segment.block_table[-1] == 1024 for segment in segments)
    assert all(0 <= block < 1024 for segment in segments for block in segment.block_table[:-1])
