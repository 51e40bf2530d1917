"""What one device holds beside weights, KV blocks and states: a step's activations, the sampler's buffers, the table of
rotary angles.

An engine that sizes its KV cache by a profiling run computes `max_num_batched_tokens` tokens, then samples for
`max_num_seqs` sequences; what is left of its memory at the worse moment of the two is for blocks. Not modelled: an
encoder's activations (some 0.3 GB for the largest image of Llama-4 Scout on two devices, less than its sampler takes).
"""

from math import ceil

from perfmodel.models.architecture import Attention, DenseFFN, LatentAttention, Layer, MoEFFN
from perfmodel.models.number_formats import bytes_per_weight
from perfmodel.models.rope import Rope
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec

_FP32, _INT32, _INT64 = 4, 4, 8
_SEGMENTS = 128  # rows from which on PyTorch sorts each by itself (aten/src/ATen/native/cuda/Sort.cu)


def activation_bytes(model: ModelSpec, shard: Sharding, engine: EngineSpec) -> float:
    """Peak of activations: T = `max_num_batched_tokens` tokens in the layers, or S = `max_num_seqs` being sampled.

        T b d + max( T b (d + widest intermediate),  S V x bytes per logit )

    The final hidden states stay while logits are computed and sampled; in the layers it is residual, hidden and the
    widest pair of tensors. V is the whole vocabulary, gathered on every rank. Standard attention holds two score
    matrices of T x T per head. Without inference mode the framework keeps what a backward pass would ask for: the
    inputs of every operator of every layer, for all tokens of the step.
    """
    size = bytes_per_weight(model.dtype)
    tokens, hidden = engine.max_num_batched_tokens, model.hidden_size
    widest = max((_intermediate(layer, shard, hidden) for layer, _ in model.layers), default=0)
    in_layers = tokens * size * (hidden + widest)
    if engine.attention == "standard":
        heads = [layer.mixer.num_heads for layer, _ in model.layers if isinstance(layer.mixer, Attention)]
        in_layers += 2.0 * shard.columns(max(heads, default=0)) * tokens * tokens * size
    stays = tokens * size * hidden
    if not engine.inference_mode:
        inputs = sum(count * _inputs(layer, shard, hidden) for layer, count in model.layers)
        stays += tokens * size * inputs / shard.pp
    per_logit = sampler_bytes_per_logit(engine, size)
    return stays + max(in_layers, per_logit * engine.max_num_seqs * model.vocab_size)


def sampler_bytes_per_logit(engine: EngineSpec, size: float) -> float:
    """Bytes held per logit when sampling holds most: logits of `size` bytes, their copy in fp32, and

    without a sort  the probabilities
    with a sort     sorted logits and their indices, and what the sort takes meanwhile: indices to begin with
                    and a second buffer of keys and values for its passes; for fewer than 128 rows, which
                    PyTorch sorts as one, pairs of (row, index) twice, keys, and that second buffer

    Source: vllm/v1/worker/gpu_model_runner.py, _dummy_sampler_run; vllm/v1/sample/sampler.py and ops/
    topk_topp_sampler.py, apply_top_k_top_p; PyTorch, aten/src/ATen/native/cuda/Sort.cu; CUB, DeviceSegmentedRadixSort
    (inputs that are not overwritten ask for room for another copy);
    TensorRT-LLM, cpp/tensorrt_llm/kernels/samplingTopPKernels.cu.

    engine: whose facts say whether it sorts
    """
    held = size + _FP32
    sorts = engine.described.facts.buffers.sorts_logits
    if sorts == "none":
        return held + _FP32
    index = _INT64 if sorts == "int64" else _INT32
    is_apart = sorts == "int32" or engine.max_num_seqs >= _SEGMENTS
    beside = index if is_apart else 2 * _INT64 + _FP32
    return held + _FP32 + index + beside + _FP32 + index


def rotary_table_bytes(model: ModelSpec, engine: EngineSpec) -> float:
    """Cosines and sines of every position that the model was trained for, whatever context the engine is to serve.

        positions x rotated elements of a head x bytes, for each distinct rotation

    All layers with equal rotations share one table, whole on every device. Source: vllm/model_executor/layers/
    rotary_embedding/base.py; pull request 44738 of vllm-project/vllm says what cutting it to the context would save.
    """
    rules = engine.described.facts.buffers
    if rules.rotary_table == "none":
        return 0.0
    size = _FP32 if rules.rotary_table == "fp32" else bytes_per_weight(model.dtype)
    tables = {_rotated(layer) for layer, _ in model.layers} - {None}
    positions = model.max_position_embeddings * (rules.positions_per_axes if model.has_position_axes else 1)
    return positions * size * sum(table[1] for table in tables if table is not None)


def _rotated(layer: Layer) -> tuple[Rope, int] | None:
    """A layer's rotation, and how many elements of a head it turns."""
    mixer = layer.mixer
    if isinstance(mixer, LatentAttention):
        return mixer.rope, mixer.qk_rope_head_dim
    if isinstance(mixer, Attention) and mixer.rope is not None:
        return mixer.rope, mixer.rope.dim or mixer.head_dim
    return None


def _inputs(layer: Layer, shard: Sharding, hidden: int) -> int:
    """Elements per token that the operators of a layer read: residual and normed state before each block, queries,
    keys, values and what attention makes of them, the halves of a feed-forward block and their product.

    Source: Korthikanti et al. 2022, section 4.1, without dropout; fused attention stores no score matrices.
    """
    total = 0
    if layer.mixer is not None:
        total += 2 * hidden
        if isinstance(layer.mixer, Attention):
            mixer = layer.mixer
            heads, kv_heads = shard.columns(mixer.num_heads), shard.kv_heads(mixer.num_kv_heads)
            total += (heads + kv_heads) * (mixer.head_dim + mixer.v_head_dim)
        else:  # about what goes in and comes out
            total += 2 * hidden
    if layer.ffn is not None:
        total += 2 * hidden + _intermediate(layer, shard, hidden)
    return total


def _intermediate(layer: Layer, shard: Sharding, hidden: int) -> int:
    """Elements per token of a feed-forward block's input and output halves on one device."""
    ffn = layer.ffn
    if isinstance(ffn, DenseFFN):
        return (3 if ffn.gated else 2) * shard.columns(ffn.intermediate_size)
    if isinstance(ffn, MoEFFN):
        per_row = (3 if ffn.gated else 2) * ceil(ffn.intermediate_size / shard.moe_tp) + (ffn.latent_size or hidden)
        rows = ceil(ffn.top_k * shard.dp / shard.ep)
        return rows * per_row
    return 0
