"""An encoder's operators, with FLOPs and bytes counted by hand."""

from functools import cache

import pytest

from perfmodel.models.cards import load_model
from perfmodel.models.vision import ImageGrid
from perfmodel.ops.graphs.encoder import heaviest
from perfmodel.ops.graphs.step import build_graph
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.work import BatchShape, Depends
from perfmodel.specs.engine.spec import EngineSpec

SQUARE = ImageGrid(1, 64, 64)  # 1,024 x 1,024 pixels in patches of 16


@cache
def nodes_of(model: str, tensor_parallel_size: int = 1, mode: str = "weights") -> dict[str, OperatorNode]:
    engine = EngineSpec(tensor_parallel_size=tensor_parallel_size, mm_encoder_tp_mode=mode)
    graph = build_graph(load_model(model), engine)
    return {node.name: node for node in graph.by_depends[Depends.IMAGES]}


def flops_of(nodes: dict[str, OperatorNode], *images: ImageGrid, names: str = "encoder_") -> float:
    shape = BatchShape(0, 0, images=images)
    works = [(node.count, node.work(shape)) for name, node in nodes.items() if name.startswith(names)]
    return sum(count * work.flops for count, work in works if work.family in ("gemm", "encoder_attention"))


def test_an_image_of_qwen3_vl() -> None:
    """N = 4,096 patches, d = 1,152, f = 4,304, 27 layers: 2 N (4 d^2 + 2 d f) in products and 4 N^2 d in attention a
    layer; 2 N x 1,536 d for the patches; four mergers of 1,024 tokens, 4 d x 4 d and 4 d x 4,096."""
    n, d, f = 4096, 1152, 4304
    layers = 27 * (2 * n * (4 * d * d + 2 * d * f) + 4 * n * n * d)
    mergers = 4 * 2 * 1024 * (4 * d * 4 * d + 4 * d * 4096)
    assert flops_of(nodes_of("qwen3-vl-8b"), SQUARE) == layers + 2 * n * 1536 * d + mergers


def test_windows_of_qwen2_5_vl() -> None:
    """52 x 92 patches (1,280 x 720) in windows of 8 x 8 are 6 x 11 whole ones, 6 of 8 x 4, 11 of 4 x 8 and one of
    4 x 4: 66 x 64^2 + 17 x 32^2 + 16^2 pairs in 28 layers, all (52 x 92)^2 in four."""
    nodes, grid = nodes_of("qwen2.5-vl-7b"), ImageGrid(1, 52, 92)
    windowed, whole = 66 * 64**2 + 17 * 32**2 + 16**2, (52 * 92) ** 2
    assert flops_of(nodes, grid, names="encoder_window_attention") == 28 * 4 * windowed * 1280
    assert flops_of(nodes, grid, names="encoder_attention") == 4 * 4 * whole * 1280


def test_frames_and_tiles_do_not_see_each_other() -> None:
    nodes = nodes_of("qwen3-vl-8b")
    video, image = ImageGrid(8, 30, 40), ImageGrid(1, 30, 40)
    assert flops_of(nodes, video) == 8 * flops_of(nodes, image) == flops_of(nodes, *[image] * 8)


def test_ranks_share_out_weights_or_images() -> None:
    """Four ranks have a fourth of the heads and widths each (but for the patches' embedding), and exchange N d elements
    of 2 bytes twice a layer; or one image of four each, with all weights and no messages but the gathered tokens."""
    alone, cut, data = (nodes_of("qwen3-vl-8b", t, mode) for t, mode in ((1, "weights"), (4, "weights"), (4, "data")))
    patches = flops_of(alone, SQUARE, names="encoder_patches")
    assert flops_of(cut, SQUARE) == pytest.approx((flops_of(alone, SQUARE) - patches) / 4 + patches, rel=1e-12)
    shape = BatchShape(0, 0, images=(SQUARE,) * 4)
    message = cut["encoder_all_reduce"].work(shape).message
    assert message is not None
    assert (cut["encoder_all_reduce"].count, message.bytes_) == (2 * 27, 4 * 4096 * 1152 * 2)
    assert flops_of(data, *[SQUARE] * 4) == flops_of(alone, SQUARE)
    assert flops_of(data, SQUARE) == flops_of(alone, SQUARE)  # one image is not cut
    gathered = data["encoder_all_gather"].work(shape).message
    assert gathered is not None
    assert gathered.bytes_ == 4 * 1024 * 4096 * 2
    assert "encoder_all_reduce" not in data


def test_the_largest_images_go_first_to_the_least_loaded_rank() -> None:
    """Sides 4, 3, 2 and 1 on two ranks: 16 patches against 9 + 4 + 1."""
    images = [ImageGrid(1, side, side) for side in (1, 2, 3, 4)]
    assert heaviest(images, 2) == [ImageGrid(1, 4, 4)]
    assert sorted(heaviest(images, 1)) == images


def test_steps_without_images_do_nothing() -> None:
    for node in nodes_of("gemma-3-27b", 2).values():
        assert node.work(BatchShape(100, 1, ((100, 0),))).num_kernels == 0
    assert not build_graph(load_model("llama-3.1-8b")).by_depends[Depends.IMAGES]


def test_only_the_first_stage_encodes() -> None:
    graph = build_graph(load_model("qwen3-vl-8b"), EngineSpec(pipeline_parallel_size=2))
    assert [bool(stage.by_depends[Depends.IMAGES]) for stage in graph.stages] == [True, False]
