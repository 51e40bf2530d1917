"""The encoder of a model's images and videos as operators, in the step before the first token that needs them.

Of N patches in sequences of T each, t = tensor-parallel ranks that share each image (`mm_encoder_tp_mode: weights`):

    patches     N x (3 x frames x patch^2) -> d                         one product
    a layer     norm, q k v: d -> 3 d / t, rotation, attention: 4 T^2 d / t FLOPs a sequence, d / t -> d,
                norm, d -> f / t (twice with a gate), activation, f / t -> d; an all-reduce of N d elements after both
    projector   its products over the tokens of the prompt, N / merge^2 of them

With windows of w x w patches all but some layers have sequences of w^2. With `data`, whole images are shared out over
the ranks, which have all weights; the rank with most patches sets the time, and the tokens are gathered.

Source: vLLM, model_executor/models/qwen2_5_vl.py, qwen3_vl.py, siglip.py, mllama4.py; vision.py
(`get_load_balance_assignment`). Not modelled: the layers' biases, and position tables."""

from collections.abc import Callable, Sequence
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
    ranks, cut = (shard.tp, 1) if has_whole_images else (1, shard.tp)
    size, width, layers = context.element_bytes, vision.hidden_size, vision.num_layers
    group, form = shard.group("tensor"), LinearFormat(context.dtype, size, size, size)
    inner, heads = ceil(vision.intermediate_size / cut), ceil(vision.num_heads / cut)
    own, num_windowed = heads * (width // vision.num_heads), layers - vision.num_full_layers if vision.window else 0
    nodes: list[OperatorNode] = []

    def add(name: str, count: int, work: Callable[[int], Work], of: Callable[[ImageGrid], int] | None = None) -> None:
        """An operator over all patches, or `of` each image."""
        count_of = of or (lambda image: image.num_patches)
        _add(nodes, name, count, ranks, lambda images: work(sum(count_of(image) for image in images)))

    def add_product(name: str, num_in: int, num_out: int, count: int = layers) -> None:
        add(name, count, partial(gemm, name, n=num_out, k=num_in, form=form))

    add_product("encoder_patches", vision.patch_elements, width, 1)
    add("encoder_norms", 2 * layers, lambda n: rms_norm("encoder_norms", n, width, size, adds_residual=True))
    add_product("encoder_qkv", width, 3 * own)
    add("encoder_rotation", layers, lambda n: elementwise("encoder_rotation", 6 * n * own, 4 * n * own * size))
    spans = (
        ("encoder_attention", layers - num_windowed, None),
        ("encoder_window_attention", num_windowed, vision.window),
    )
    for name, count, window in spans:
        work = partial(encoder_attention, name, vision=vision, heads=heads, context=context, window=window)
        _add(nodes, name, count, ranks, work)
    add_product("encoder_out", own, width)
    add_product("encoder_up", width, inner * (1 + vision.is_gated))
    function, gated = ("silu", True) if vision.is_gated else ("gelu", False)
    gate = partial(activation, size=inner, element_bytes=size, function=function, is_gated=gated, is_fused=True)
    add("encoder_activation", layers, gate)
    add_product("encoder_down", inner, width)
    for place, (num_in, num_out) in enumerate(vision.projections, 1):
        name = f"encoder_projector_{place}"
        add(name, 1, partial(gemm, name, n=ceil(num_out / cut), k=num_in, form=form), vision.rule.num_tokens)
    if cut > 1:
        add("encoder_all_reduce", 2 * layers, lambda n: all_reduce(n * width * size, group, "encoder_all_reduce"))
    elif ranks > 1:
        row_bytes, ranks = vision.projections[-1][1] * size, 1  # of the tokens of all images
        add("encoder_all_gather", 1, lambda n: all_gather(n * row_bytes, group), vision.rule.num_tokens)
    return nodes


def _add(nodes: list[OperatorNode], name: str, count: int, ranks: int, work: Callable[[Images], Work]) -> None:
    nothing = Work(name, "elementwise", rate="vector", num_kernels=0)

    def of_step(shape: BatchShape) -> Work:
        return work(heaviest(shape.images, ranks)) if shape.images else nothing

    if count:
        nodes.append(OperatorNode(name, count, Depends.IMAGES, of_step))


def heaviest(images: Images, ranks: int) -> Images:
    """The images of the rank with most patches, where the largest go first, each to the rank with fewest so far."""
    shares: list[list[ImageGrid]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(images, key=lambda grid: -grid.num_patches):
        place = loads.index(min(loads))
        shares[place].append(image)
        loads[place] += image.num_patches
    return shares[loads.index(max(loads))]


def encoder_attention(
    name: str, images: Images, vision: VisionEncoder, heads: int, context: LayerContext, window: int | None = None
) -> Work:
    """Attention in which every patch sees all of its sequence: 4 T^2 h FLOPs for each of H heads of size h, and
    Q, K, V, O once.

    name: of the operator in `vision`; context: of its device, with `heads` of its heads; window: patches of a side that
    are a sequence; None: whole tiles, images and frames"""
    sequences = tuple(length for image in images for length in _sequences(image, window))
    head_dim, tokens = vision.hidden_size // vision.num_heads, sum(sequences)
    pairs, half = sum(length * length for length in sequences), 2.0 * tokens * heads * head_dim * context.element_bytes
    shape = HeadShape(heads, heads, head_dim, head_dim, context.element_bytes)
    blocks, prefills = heads * sum(ceil(length / _TILE) for length in sequences), tuple((n, 0) for n in sequences)
    return Work(
        name,
        "encoder_attention",
        flops=4.0 * pairs * heads * head_dim,
        rate=context.dtype,
        activation_bytes=half,
        kv_bytes=half,
        problem=PrefillSize(shape, prefills, tokens, tokens, pairs, blocks, is_causal=False),
    )


def _sequences(image: ImageGrid, window: int | None) -> list[int]:
    if window is None:
        return [image.rows * image.columns] * image.sequences
    rows, columns = ([min(window, size - at) for at in range(0, size, window)] for size in (image.rows, image.columns))
    return [row * column for row in rows for column in columns] * image.sequences
