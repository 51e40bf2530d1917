"""What a model that returns a vector, or scores, has in place of the LM head and sampling.

The pooler takes the last or the first state of each prompt, or the mean of all; a vector is normalised, scores are a
product with the labels, in encoders behind a layer with an activation. Every tensor-parallel rank does it alike. Not
modelled: the copy of the results to the host (4 d bytes a prompt), projections behind the pooler."""

from functools import partial
from math import ceil

from perfmodel.ops.elementwise import FP32_BYTES, elementwise
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_samples, on_tokens
from perfmodel.ops.work import Work

_SUMMED_BYTES = 16 * 2**20  # of fp32 states that vLLM adds to the sums of their prompts in one call


def mean_pool(num_tokens: float, hidden_size: int, element_bytes: float) -> Work:
    """Sums of the states of each prompt, in fp32: n d (b + 4) bytes to cast, n d (4 + 4) to read and add.

    Two kernels for each 16 MiB of states in fp32. The sums of few prompts stay in L2 and are counted once. num_tokens
    n; hidden_size d; element_bytes b. Source: vllm/model_executor/layers/pooler/seqwise/methods.py, MeanPool."""
    elements = num_tokens * hidden_size
    num_kernels = 2 * ceil(elements * FP32_BYTES / _SUMMED_BYTES)
    return elementwise("mean_pool", elements, elements * (element_bytes + 3 * FP32_BYTES), num_kernels)


def take_states(num_prompts: float, hidden_size: int, element_bytes: float) -> Work:
    """One state of each prompt, the first or the last: 2 B d b bytes. num_prompts B; hidden_size d; element_bytes b.
    Source: identity."""
    return elementwise("take_states", 0.0, 2 * num_prompts * hidden_size * element_bytes, int(num_prompts > 0))


def normalize(num_prompts: float, hidden_size: int, element_bytes: float) -> Work:
    """x / max(|x|, eps) in fp32: B d (b + 4) bytes to cast, B d 4 for the norm, B d 8 to divide; four kernels.

    num_prompts B; hidden_size d; element_bytes b. Source: torch.nn.functional.normalize."""
    elements = num_prompts * hidden_size
    num_bytes = elements * (element_bytes + 4 * FP32_BYTES)
    return elementwise("normalize", 3.0 * elements, num_bytes, 4 if num_prompts else 0)


def pooler_nodes(context: LayerContext) -> list[OperatorNode]:
    """The operators behind the last norm of a model with `ModelSpec.pooling`."""
    model, hidden, size = context.model, context.hidden, context.element_bytes
    if model.pooling == "mean":
        nodes = [on_tokens("mean_pool", partial(mean_pool, hidden_size=hidden, element_bytes=size))]
    else:
        nodes = [on_samples("take_states", partial(take_states, hidden_size=hidden, element_bytes=size))]
    if not model.num_labels:
        return [*nodes, on_samples("normalize", partial(normalize, hidden_size=hidden, element_bytes=size))]
    form, has_layer = context.format("lm_head"), model.is_encoder
    head = partial(gemm, "score", n=model.num_labels, k=hidden, form=form, has_bias=has_layer)
    if has_layer:
        layer = partial(gemm, "score_layer", n=hidden, k=hidden, form=form, has_bias=True)
        nodes.append(on_samples("score_layer", layer))
    return [*nodes, on_samples("score", head)]
