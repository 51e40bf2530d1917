"""The encoder of a model's images and videos as operators, in the step before the first token that needs them.

Of N patches in sequences of T each, t = tensor-parallel ranks that share each image (`mm_encoder_tp_mode: weights`):

    patches     N x (3 x frames x patch^2) -> d                         one product
    a layer     norm, q k v: d -> 3 d / t, rotation, attention: 4 T^2 d / t FLOPs a sequence, d / t -> d,
                norm, d -> f / t (twice with a gate), activation, f / t -> d; an all-reduce of N d elements after both
    projector   its products over the tokens of the prompt, N / merge^2 of them

With windows of w x w patches all but some layers have sequences of w^2. With `data`, whole images are shared out over
the ranks, which have all weights; the rank with most patches sets the time, and the tokens are gathered.

Source: vLLM, model_executor/models/qwen2_5_vl.py, qwen3_vl.py, siglip.py, mllama4.py; vision.py
(`get_load_balance_assignment`). Not modelled: launches, which hide behind all but the smallest images; the layers'
biases, and position tables."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from perfmodel.models.vision import ImageGrid, VisionEncoder
from perfmodel.ops.collectives import all_gather, all_reduce
from perfmodel.ops.elementwise import activation, elementwise, rms_norm
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode
from perfmodel.ops.problem_sizes import HeadShape, PrefillSize
from perfmodel.ops.work import BatchShape, Depends, Work

_TILE = 128  # rows of a thread block
Images = Sequence[ImageGrid]


def encoder_nodes(context: LayerContext, has_whole_images: bool = False) -> list[OperatorNode]:
    """The operators; none for a model without a known encoder. has_whole_images: ranks share out whole images"""
    vision, shard = context.model.vision, context.shard
    if vision is None:
        return []
    ranks = shard.tp if has_whole_images else 1
    cut = 1 if has_whole_images else shard.tp
    size, group, width = context.element_bytes, shard.group("tensor"), vision.hidden_size
    form = LinearFormat(context.dtype, size, size, size)

    def on_patches(name: str, count: int, work: Callable[[int], Work]) -> OperatorNode:
        return _on(name, count, ranks, lambda images: work(sum(image.num_patches for image in images)))

    def product(name: str, num_in: int, num_out: int, count: int = vision.num_layers) -> OperatorNode:
        return on_patches(name, count, partial(gemm, name, n=num_out, k=num_in, form=form))

    inner, layers = ceil(vision.intermediate_size / cut), vision.num_layers
    heads = ceil(vision.num_heads / cut)
    own = heads * (width // vision.num_heads)
    nodes = [
        product("encoder_patches", vision.patch_elements, width, 1),
        on_patches(
            "encoder_norms", 2 * layers, lambda n: rms_norm("encoder_norms", n, width, size, adds_residual=True)
        ),
        product("encoder_qkv", width, 3 * own),
        on_patches(
            "encoder_rotation", layers, lambda n: elementwise("encoder_rotation", 6 * n * own, 4 * n * own * size)
        ),
        *_attention(vision, heads, context, ranks),
        product("encoder_out", own, width),
        product("encoder_up", width, inner * (1 + vision.is_gated)),
        on_patches("encoder_activation", layers, partial(_activation, vision, inner, size)),
        product("encoder_down", inner, width),
    ]
    for place, (num_in, num_out) in enumerate(vision.projections):
        rows = partial(_projected, vision, gemm, f"encoder_projector_{place + 1}", ceil(num_out / cut), num_in, form)
        nodes.append(_on(f"encoder_projector_{place + 1}", 1, ranks, rows))
    if cut > 1:
        work = partial(all_reduce, ranks=group, name="encoder_all_reduce")
        nodes.append(on_patches("encoder_all_reduce", 2 * layers, lambda n: work(n * width * size)))
    if ranks > 1:
        nodes.append(_on("encoder_all_gather", 1, 1, partial(_gathered, vision, context)))
    return [replace(node, work=partial(_if_any, node)) for node in nodes]


def _on(name: str, count: int, ranks: int, work: Callable[[Images], Work]) -> OperatorNode:
    return OperatorNode(name, count, Depends.IMAGES, lambda shape: work(heaviest(shape.images, ranks)))


def _if_any(node: OperatorNode, shape: BatchShape) -> Work:
    return node.work(shape) if shape.images else Work(node.name, "elementwise", rate="vector", num_kernels=0)


def heaviest(images: Images, ranks: int) -> Images:
    """The images of the rank with most patches, where the largest go first, each to the rank with fewest so far."""
    if ranks == 1:
        return images
    shares: list[list[ImageGrid]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(images, key=lambda grid: -grid.num_patches):
        place = loads.index(min(loads))
        shares[place].append(image)
        loads[place] += image.num_patches
    return shares[loads.index(max(loads))]


def _attention(vision: VisionEncoder, heads: int, context: LayerContext, ranks: int) -> list[OperatorNode]:
    num_windowed = vision.num_layers - vision.num_full_layers if vision.window else 0

    def node(name: str, count: int, window: int | None) -> OperatorNode:
        return _on(name, count, ranks, lambda images: encoder_attention(name, images, vision, heads, context, window))

    nodes = [node("encoder_attention", vision.num_layers - num_windowed, None)]
    if num_windowed:
        nodes.append(node("encoder_window_attention", num_windowed, vision.window))
    return [one for one in nodes if one.count]


def encoder_attention(
    name: str, images: Images, vision: VisionEncoder, heads: int, context: LayerContext, window: int | None = None
) -> Work:
    """Attention in which every patch sees all of its sequence: 4 T^2 h FLOPs for each of H heads of size h, and
    Q, K, V, O once.

    window: patches of a side that are a sequence; None: whole tiles, images and frames"""
    sequences = tuple(length for image in images for length in _sequences(image, window))
    head_dim, size, tokens = vision.hidden_size // vision.num_heads, context.element_bytes, sum(sequences)
    pairs = sum(length * length for length in sequences)
    shape = HeadShape(heads, heads, head_dim, head_dim, size)
    blocks = heads * sum(ceil(length / _TILE) for length in sequences)
    prefills = tuple((length, 0) for length in sequences)
    return Work(
        name,
        "encoder_attention",
        flops=4.0 * pairs * heads * head_dim,
        rate=context.dtype,
        activation_bytes=2.0 * tokens * heads * head_dim * size,
        kv_bytes=2.0 * tokens * heads * head_dim * size,
        problem=PrefillSize(shape, prefills, tokens, tokens, pairs, blocks, is_causal=False),
    )


def _sequences(image: ImageGrid, window: int | None) -> list[int]:
    if window is None:
        return [image.rows * image.columns] * image.sequences
    rows, columns = (
        [min(window, size - start) for start in range(0, size, window)] for size in (image.rows, image.columns)
    )
    return [row * column for row in rows for column in columns] * image.sequences


def _activation(vision: VisionEncoder, inner: int, size: float, num_patches: int) -> Work:
    function = "silu" if vision.is_gated else "gelu"
    return activation(num_patches, inner, size, function=function, is_gated=vision.is_gated, is_fused=True)


def _projected(
    vision: VisionEncoder,
    work: Callable[..., Work],
    name: str,
    num_out: int,
    num_in: int,
    form: LinearFormat,
    images: Images,
) -> Work:
    return work(name, sum(vision.rule.num_tokens(image) for image in images), num_out, num_in, form)


def _gathered(vision: VisionEncoder, context: LayerContext, images: Images) -> Work:
    tokens = sum(vision.rule.num_tokens(image) for image in images)
    num_bytes = tokens * vision.projections[-1][1] * context.element_bytes
    return all_gather(num_bytes, context.shard.group("tensor"), "encoder_all_gather")
