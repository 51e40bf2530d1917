"""Mixture of experts: the router, and the experts themselves (`routing`: their load; `exchange`: who gets a copy)."""

__all__ = ["EXPERT_KERNELS", "experts", "route"]

from math import ceil

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.experts.routing import ExpertLoad
from perfmodel.ops.extents import ExpertsExtent
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.work import Work

EXPERT_KERNELS = 5  # sort by expert (align), grouped gate-up, activation, grouped down, weighted sum
# Of each expert that has tokens: find them, gather them, gate, up, activation, product, down; gather and
# apply their weights, add to the sum.
_EAGER_EXPERT_KERNELS = 10
_EAGER_ROUTE_KERNELS = 8  # cast, softmax, top-k, sum, division, cast, and the mask of who goes where: zeros, scatter


def route(num_tokens: float, num_experts: int, top_k: int, *, is_fused: bool = True) -> Work:
    """Softmax (or sigmoid) and top-k over the router's logits: 4 n E bytes read, 8 n k written (weight and index).

    Unfused the logits are cast and the scores written and read (14 n E bytes more), and each choice gets a row of E
    integers (16 n k E bytes).

    num_tokens n: rows of logits; num_experts E: of the model, of which each token gets top_k k; is_fused: in one kernel
    """
    extra = 0.0 if is_fused else (14.0 + 16.0 * top_k) * num_experts
    return Work(
        "topk",
        "elementwise",
        flops=8.0 * num_tokens * num_experts,
        rate="vector",
        activation_bytes=num_tokens * (4.0 * num_experts + 8.0 * top_k + extra),
        num_kernels=1 if is_fused else _EAGER_ROUTE_KERNELS,
    )


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
) -> Work:
    """The routed experts of one rank: grouped up GEMM, activation, grouped down GEMM, combine.

        FLOPs = 2 A (g + 1) d f              A assignments, g = 2 gated or 1, f intermediate size on this rank
        weights = D (g + 1) d f w            D distinct experts: each is read once
        activations per assignment: up d a + g f o, activation g f o + f a, down f a + d o, combine d o;
                    and n d o for the sum

    with w, a, o bytes of a weight, a multiplied input and an output. `width` is d, or the latent width the experts
    work in; `local_experts` the experts that this rank holds (default all). Unfused, every distinct expert launches its
    own kernels, gate and up read their input each, and gathered rows, activations, weighted outputs and sums are
    written and read: (g + 1) d a + 2 f o (gated) + 4 d o more per assignment. The up GEMM gathers its rows by index;
    libraries that permute (or quantize) them first move more. Source: identity; D: `distinct_experts`; Hugging Face's
    MixtralSparseMoeBlock for the operators.

    num_tokens n: of all ranks that share out the experts; ffn: the block; load: of this rank
    form: of weights and inputs; is_fused: by serving engines' kernels
    """
    if num_tokens == 0:
        return Work("experts", "moe", rate=form.rate, num_kernels=0)
    d, f, gates = width, intermediate, 2 if ffn.gated else 1
    o, a = form.output_bytes, form.input_bytes
    row_bytes = (d * a + gates * f * o) + (gates * f * o + f * a) + (f * a + d * o) + d * o
    num_kernels = EXPERT_KERNELS + 2 * form.quantizes_input
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
        extent=ExpertsExtent(
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
