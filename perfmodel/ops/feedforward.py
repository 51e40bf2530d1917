"""The operators of one feed-forward block: dense (sharded by columns, then rows), or a mixture of experts.

As vLLM runs a mixture, with n tokens on each of dp ranks of tp devices:
    dp = 1                    every device holds all n tokens; experts cut by width, or shared out whole under expert
                              parallelism; one all-reduce combines either way
    dp > 1, cut by width      all-gather of the tokens of all ranks, then reduce-scatter, then an all-gather within the
                              tensor-parallel group
    dp > 1, expert parallel   the same with vLLM's default all2all backend (allgather_reducescatter), router logits
                              included; with the others an all-to-all to the ranks of the chosen experts and back (each
                              device dispatches n / tp tokens), and the last all-gather

Experts, all-gather and reduce-scatter see the tokens of all ranks (`BatchShape.group_tokens`). An all-to-all lasts as
long as its largest sender, the rank that sets the time, so it counts the rank's own tokens; DeepEP's, as long as the
rank receives whose experts get most, were all ranks to send as much. `routing` assigns tokens to experts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, inf

from perfmodel.models.architecture import DenseFFN, MoEFFN
from perfmodel.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, tensor_parallel
from perfmodel.ops.elementwise import activation, elementwise, gate
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm, linear_nodes
from perfmodel.ops.messages import Exchange, distinct_ranks
from perfmodel.ops.node import LayerContext, OperatorNode, on_group, on_rows, on_tokens
from perfmodel.ops.problem_sizes import ExpertsSize
from perfmodel.ops.routing import TILE_ROWS, ExpertLoad
from perfmodel.ops.work import Work
from perfmodel.specs.engine.description import ExpertsRow

EXPERT_KERNELS = 5  # sort by expert (align), grouped gate-up, activation, grouped down, weighted sum
# Of each expert that has tokens: find them, gather them, gate, up, activation, product, down; gather and
# apply their weights, add to the sum.
_EAGER_EXPERT_KERNELS = 10
_EAGER_ROUTE_KERNELS = 8  # cast, softmax, top-k, sum, division, cast, and the mask of who goes where: zeros, scatter


def route(num_tokens: float, num_experts: int, top_k: int, *, is_fused: bool = True) -> Work:
    """Softmax (or sigmoid) and top-k of the router's logits: 4 n E bytes read, 8 n k written (weight and index).

    Unfused, logits are cast, scores written and read (14 n E bytes more), and each choice is one-hot encoded over E
    integers (16 n k E bytes). num_tokens n; num_experts E; top_k k; is_fused: one kernel"""
    extra = 0.0 if is_fused else (14.0 + 16.0 * top_k) * num_experts
    num_bytes = num_tokens * (4.0 * num_experts + 8.0 * top_k + extra)
    return elementwise("topk", 8.0 * num_tokens * num_experts, num_bytes, 1 if is_fused else _EAGER_ROUTE_KERNELS)


def experts(
    num_tokens: float,
    ffn: MoEFFN,
    load: ExpertLoad,
    form: LinearFormat,
    *,
    width: int,
    intermediate: int,
    local_experts: int | None = None,
    is_fused: bool = True,
    num_kernels: int | None = None,
) -> Work:
    """The routed experts of one rank: grouped up GEMM, activation, grouped down GEMM, combine.

        FLOPs = 2 A (g + 1) d f              A assignments, g = 2 gated or 1, f intermediate size on this rank
        weights = D (g + 1) d f w            D distinct experts: each is read once
        activations per assignment: up d a + g f o, activation g f o + f a, down f a + d o, combine d o;
                    and n d o for the sum

    with w, a, o bytes of a weight, a multiplied input and an output. `width` is d, or the latent width of the experts;
    `local_experts` those on this rank (default all). Unless `is_fused`, every distinct expert launches its own kernels,
    gate and up each read their input, and gathered rows, activations, weighted outputs and sums are written and read:
    (g + 1) d a + 2 f o (gated) + 4 d o more per assignment. The up GEMM gathers rows by index; libraries that permute
    or quantize first move more. num_tokens n: that the kernels see; ffn: the block; load: of this rank;
    form: weights and inputs; intermediate: f; num_kernels: of the fused kernels, if known. Source: identity; D:
    `distinct_experts`; Hugging Face's MixtralSparseMoeBlock for the unfused operators."""
    if num_tokens == 0:
        return Work("experts", "moe", rate=form.rate, num_kernels=0)
    d, f, gates = width, intermediate, 2 if ffn.gated else 1
    o, a = form.output_bytes, form.input_bytes
    row_bytes = (d * a + gates * f * o) + (gates * f * o + f * a) + (f * a + d * o) + d * o
    num_kernels = num_kernels or EXPERT_KERNELS + 2 * form.quantizes_input
    if not is_fused:
        num_kernels = (_EAGER_EXPERT_KERNELS - (not ffn.gated) * 2) * ceil(load.distinct)
        row_bytes += (1 + gates) * d * a + 2 * f * o * ffn.gated + 4 * d * o
    return Work(
        "experts",
        "moe",
        flops=2.0 * load.assignments * (gates + 1) * d * f,
        rate=form.rate,
        weight_bytes=load.distinct * (gates + 1) * d * f * form.weight_bytes,
        activation_bytes=load.assignments * row_bytes + num_tokens * d * o,
        num_kernels=num_kernels,
        problem=ExpertsSize(
            tokens=num_tokens,
            top_k=ffn.top_k,
            num_experts=ffn.num_experts,
            local_experts=local_experts or ffn.num_experts,
            width=d,
            inner=f,
            gates=gates,
            distinct=load.distinct,
            assignments=load.assignments,
            tiles=load.tiles,
            sum_bytes=num_tokens * d * o,
            weight_bytes=form.weight_bytes,
            input_bytes=form.input_bytes,
        ),
        format=form.name,
    )


def moe_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    """Router, top-k, shared experts, dispatch, routed experts, combine."""
    hidden, router = context.hidden, context.format("router")
    chosen = partial(route, num_experts=ffn.num_experts, top_k=ffn.top_k, is_fused=context.is_fused)
    return [
        on_tokens("router", partial(gemm, "router", n=ffn.num_experts, k=hidden, form=router)),
        *([] if context.experts is not None and context.experts.chooses else [on_tokens("topk", chosen)]),
        *_shared_nodes(ffn, context),
        *_latent_nodes(ffn, context, "latent_in_proj"),
        *_dispatch_nodes(ffn, context),
        *_expert_nodes(ffn, context),
        *_latent_nodes(ffn, context, "latent_out_proj"),
        *_combine_nodes(ffn, context),
    ]


def _expert_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    shard, form, row = context.shard, context.format("experts"), context.experts
    intermediate = ceil(ffn.intermediate_size / shard.moe_tp)
    width, local = ffn.latent_size or context.hidden, shard.local_experts(ffn.num_experts)
    sizes = {"width": width, "intermediate": intermediate, "local_experts": local}
    # Of tokens that are sent to the ranks of their experts, the host knows how many came for each.
    least = row.aligned_from(width, intermediate) if row is not None and shard.gathers_tokens else inf

    def work(everyone: int) -> Work:
        load = context.routing(ffn, everyone, shard.ep)
        # Of tokens that are sent, kernels see what arrives: rows for this rank's experts, k of them as much as a token.
        num_tokens = everyone if shard.gathers_tokens else load.assignments / ffn.top_k
        kernels = row.num_kernels if row is not None and not row.checks_shape else None
        return experts(num_tokens, ffn, load, form, **sizes, is_fused=context.is_fused, num_kernels=kernels)

    nodes = [on_group("experts", lambda n: work(n if n < least else 0), shard.dp)] if least else []
    return nodes if row is None or least == inf else nodes + _aligned_nodes(ffn, context, row, **sizes)


def _aligned_nodes(
    ffn: MoEFFN, context: LayerContext, row: ExpertsRow, *, width: int, intermediate: int, local_experts: int
) -> list[OperatorNode]:
    """Routed experts as contiguous grouped GEMMs: rows are permuted so that each expert has whole blocks of b rows.

        max_rows = n k + E_local (b - 1), rounded up to whole blocks: the worst case, since the host does not know how
                   many tokens each expert gets; buffers, activation and its quantization have that many rows
        rows     = max_rows, or b times the expected blocks where the GEMMs skip empty ones
        up, down   GEMMs of `rows`, which read the weights of the D experts with tokens
        permute    quantize n d elements, copy them to A d, lay out scales of max_rows d   combine   read A d, write n d

    Source: vLLM, fused_moe/{deep_gemm_moe,deep_gemm_utils}.py (compute_aligned_M; expert_ids of blocks without a token
    are 0 up to v0.12, -1 since); DeepGEMM, csrc/apis/layout.hpp (transform_sf_into_required_layout)."""
    form, ranks, block = context.format("experts"), context.shard.ep, row.aligned_rows or 1
    d, f, size, gates = width, intermediate, form.output_bytes, 2 if ffn.gated else 1
    permuted, tile = form._replace(quantizes_input=False), TILE_ROWS.index(block)

    def max_rows(n: int) -> int:
        return ceil((n * ffn.top_k + local_experts * (block - 1)) / block) * block

    def product(num_out: int, num_in: int, form: LinearFormat, name: str, n: int) -> Work:
        load = context.routing(ffn, n, ranks)
        rows = max_rows(n) if row.multiplies_empty_blocks else block * load.tiles[tile]
        work = gemm(name, rows, num_out, num_in, form)
        return replace(work, weight_bytes=work.weight_bytes * max(1.0, load.distinct))

    def pairs(n: int) -> float:
        return context.routing(ffn, n, ranks).assignments

    def permute(name: str, n: int) -> Work:
        row_bytes = n * (size + 2 * form.input_bytes) + pairs(n) * form.input_bytes + max_rows(n) * 2 * 4 / 128
        return elementwise(name, 0.0, row_bytes * d, row.num_kernels - 5)  # up, activation, quantizing, down, combine

    def activate(name: str, n: int) -> Work:
        return activation(max_rows(n), f, size, function=ffn.activation, is_gated=ffn.gated, is_fused=True)

    def node(name: str, work: Callable[[str, int], Work]) -> OperatorNode:
        least, nothing = row.aligned_from(d, f) or 1, elementwise(name, 0.0, 0.0, 0)
        return on_group(name, lambda n: work(name, n) if n >= least else nothing, context.shard.dp)

    return [
        node("experts_permute", permute),
        node("experts_up_proj", partial(product, gates * f, d, permuted)),
        node("experts_activation", activate),
        node("experts_down_proj", partial(product, d, f, form)),
        node("experts_combine", lambda name, n: elementwise(name, 0.0, (pairs(n) + n) * d * size)),
    ]


def _shared_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    if not ffn.shared_intermediate_size:
        return []
    nodes = _mlp_nodes(
        context.shard.columns(ffn.shared_intermediate_size),
        context,
        component="shared_experts",
        is_gated=ffn.gated,
        function=ffn.activation,
        prefix="shared_",
    )
    if ffn.shared_gate:
        hidden, form, fused = context.hidden, context.format("shared_experts"), context.is_fused
        gated = partial(gate, "shared_gate", size=hidden, element_bytes=context.element_bytes, is_fused=fused)
        nodes.append(on_tokens("shared_expert_gate", partial(gemm, "shared_expert_gate", n=1, k=hidden, form=form)))
        nodes.append(on_tokens("shared_gate", gated))
    return nodes


def _latent_nodes(ffn: MoEFFN, context: LayerContext, name: str) -> list[OperatorNode]:
    """Projections into and out of the experts' latent width, replicated on every device."""
    if ffn.latent_size is None:
        return []
    form = context.format("shared_experts")
    n, k = (ffn.latent_size, context.hidden) if name == "latent_in_proj" else (context.hidden, ffn.latent_size)
    return [on_tokens(name, partial(gemm, name, n=n, k=k, form=form))]


def _dispatch_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    shard = context.shard
    if shard.dp == 1:
        return []
    width = ffn.latent_size or context.hidden
    if shard.gathers_tokens:
        # Tokens of a tensor-parallel group are on all its devices; under expert parallelism each hands on its part,
        # with what the router said of them.
        ranks = shard.group("expert" if shard.is_expert_parallel else "data")
        logits = ffn.num_experts if shard.is_expert_parallel else 0
        payload, name = (width + logits) * context.element_bytes, "moe_all_gather"
        return [on_group(name, lambda n: all_gather(n * payload, ranks, name), shard.dp)]
    return [_exchange_node(ffn, context, "dispatch", context.format("experts").input_bytes)]


def _exchange_node(ffn: MoEFFN, context: LayerContext, kernel: str, element_bytes: float) -> OperatorNode:
    """Dispatch or combine; a device handles a tp-th of its rank's tokens."""
    shard, name, width = context.shard, f"moe_{kernel}", ffn.latent_size or context.hidden
    group, copy = shard.group("expert"), width * element_bytes / shard.tp
    sent = distinct_ranks(ffn, shard.ep) * copy

    def exchange(n: int, has_prompts: bool) -> Work:
        route, everyone, busiest = shard.route_of(has_prompts), n * shard.dp, 1.0
        if n and route in ("node", "expert"):
            most = context.routing(ffn, everyone, shard.ep).assignments
            busiest = max(busiest, most * shard.ep / (everyone * min(ffn.top_k, ffn.num_experts)))
        return all_to_all(n * sent, group, name, kernel, Exchange(ffn, n * copy, route, busiest))

    if shard.route == "auto":
        return on_rows(name, lambda n, num_decodes: exchange(n, n > num_decodes))
    return on_tokens(name, lambda n: exchange(n, True))


def _combine_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    shard, size = context.shard, context.element_bytes
    hidden_bytes, payload = context.hidden * size, (ffn.latent_size or context.hidden) * size
    if shard.dp == 1:
        return tensor_parallel(all_reduce, "moe_all_reduce", hidden_bytes, context)
    if not shard.gathers_tokens:
        nodes = [_exchange_node(ffn, context, "combine", size)]
    else:
        ranks, name = shard.group("expert"), "moe_reduce_scatter"
        nodes = [on_group(name, lambda n: reduce_scatter(n * payload, ranks, name), shard.dp)]
    return nodes + tensor_parallel(all_gather, "moe_tp_all_gather", hidden_bytes, context)


def dense_ffn_nodes(ffn: DenseFFN, context: LayerContext) -> list[OperatorNode]:
    """Gate and up projection (one GEMM when fused), activation, down projection."""
    return _mlp_nodes(
        context.shard.columns(ffn.intermediate_size),
        context,
        component="dense_ffn",
        is_gated=ffn.gated,
        function=ffn.activation,
        has_bias=ffn.bias,
        ranks=(ffn.up_rank, ffn.down_rank),
    )


def _mlp_nodes(
    width: int,
    context: LayerContext,
    *,
    component: str,
    is_gated: bool,
    function: str,
    has_bias: bool = False,
    prefix: str = "",
    ranks: tuple[int | None, int | None] = (None, None),
) -> list[OperatorNode]:
    """A dense block of `width` intermediate elements on this device; `ranks`: low ranks of its two halves.

    component: whose number format it has (a name in `COMPONENTS`); has_bias: of the up projection"""
    form, hidden, size = context.format(component), context.hidden, context.element_bytes
    if is_gated:
        ups = {"gate_up_proj": 2 * width} if context.is_fused else {"gate_proj": width, "up_proj": width}
    else:
        ups = {"up_proj": width}
    ups = {prefix + name: columns for name, columns in ups.items()}
    up_rank, down_rank = ranks
    nodes = linear_nodes(ups, hidden, form, rank=up_rank, thin=f"{prefix}up_rank_proj", has_bias=has_bias)
    act = partial(
        activation, size=width, element_bytes=size, function=function, is_gated=is_gated, is_fused=context.is_fused
    )
    nodes.append(on_tokens(prefix + "activation", act))
    return nodes + linear_nodes({prefix + "down_proj": hidden}, width, form, rank=down_rank, has_bias=has_bias)
