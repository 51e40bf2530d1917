"""LoRA adapters: beside a linear layer of K inputs and N outputs, y += (x A) B for the tokens of each adapter.

m tokens name one of D adapters of rank r (that of a slot: vLLM pads), in a layer of s slices (queries, keys, values):

    shrink    2 m r K s FLOPs; D r K s weights, K m inputs read, sums of 4 m r s bytes zeroed and written
    expand    2 m r N FLOPs; D r N weights, sums read, m N outputs read and written

Sharded as the layer: of columns A is whole on each device and B cut, of rows A is cut and B whole, its product a part
of the sum that the all-reduce adds up. Embedding and LM head are whole on each device.

Grouped kernels (vLLM's) start thread blocks for each of S slots and for no adapter, taken or not, and those without
tokens end at once; M is all tokens of the step:

    shrink    c ceil(M / 32) ceil(r / 16) s (S + 1),  c = 64 below 128 tokens, else 8
    expand    ceil(M / 64) ceil(N / t) s (S + 1),     N of the widest slice, t = 64 for several, else 128

Others go through the adapters of a step one by one.

Source: vllm/lora/ops/triton_ops (`lora_shrink`, `lora_expand`, `get_lora_op_configs` without tuned files) and
vllm/lora/layers, vLLM 0.30; Hu et al. 2021 (LoRA); Chen et al. 2023 (Punica)."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import ceil
from typing import NamedTuple

from perfmodel.models import architecture as arch
from perfmodel.models.number_formats import bytes_per_weight
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.node import LayerContext, OperatorNode
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import AdapterMix, BatchShape, Depends, Work
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import Adapters

_SUM_BYTES = 4.0  # of what is between A and B
_FEW_ROWS, _MANY_SPLITS, _FEW_SPLITS = 128, 64, 8  # K is split in many parts for few tokens
_SHRINK_TILE, _EXPAND_ROWS, _EXPAND_COLUMNS = (32, 16), 64, (128, 64)
_LOOP_KERNELS = 2  # of an adapter and layer one by one: its rows gathered and multiplied, or multiplied and added


class AdapterTarget(NamedTuple):
    """A linear layer on one device: `name` as vLLM has it, inputs, outputs of each slice."""

    name: str
    num_in: int
    widths: tuple[int, ...]

    @property
    def elements_per_rank(self) -> int:
        """Elements of A and B in a device's memory, per rank."""
        return len(self.widths) * self.num_in + sum(self.widths)


class _Product(NamedTuple):
    """Shrink or expand. weights: elements per rank of an adapter; row_bytes: moved for a token; blocks: thread blocks
    of an adapter's slot for so many tokens; is_sampled: of sampled tokens only"""

    name: str
    weights: int
    row_bytes: float
    blocks: Callable[[int], int]
    num_kernels: int
    is_sampled: bool


class AdapterSize(NamedTuple):
    """num_items: thread blocks that are started, or adapters one by one"""

    num_items: float

    @property
    def traits(self) -> None:
        return None


def adapter_mix(engine: EngineSpec, adapters: Adapters | None) -> AdapterMix | None:
    """What steps of `engine` have of the traffic's `adapters`; None where it serves none."""
    if not engine.enable_lora:
        return None
    is_grouped = engine.rules.serves_adapters == "grouped"
    chances = adapters.chances if adapters is not None else ()
    return AdapterMix(engine.max_loras, engine.max_lora_rank, engine.lora_target_modules, chances, is_grouped)


def block_targets(block: arch.Mixer | arch.FeedForward | None, hidden: int, shard: Sharding) -> list[AdapterTarget]:
    """The linear layers of `block`; none of kinds that `refuse_to_start` refuses."""
    if isinstance(block, arch.Attention):
        heads, kv_heads = shard.columns(block.num_heads), shard.kv_heads(block.num_kv_heads)
        out = heads * block.v_head_dim
        query = heads * block.head_dim + (out if block.output_gate else 0)
        widths = (query, kv_heads * block.head_dim, kv_heads * block.v_head_dim)
        return [AdapterTarget("qkv_proj", hidden, widths), AdapterTarget("o_proj", out, (hidden,))]
    if isinstance(block, arch.DenseFFN):
        width = shard.columns(block.intermediate_size)
        ups = (width,) * (2 if block.gated else 1)
        return [AdapterTarget("gate_up_proj", hidden, ups), AdapterTarget("down_proj", width, (hidden,))]
    return []


def vocabulary_targets(model: ModelSpec) -> tuple[AdapterTarget, AdapterTarget]:
    """Embedding and LM head."""
    embedding = AdapterTarget("embed_tokens", model.vocab_size, (model.hidden_size,))
    return embedding, AdapterTarget("lm_head", model.hidden_size, (model.vocab_size,))


def adapter_nodes(targets: Iterable[AdapterTarget], context: LayerContext) -> list[OperatorNode]:
    """Shrink and expand beside each of `targets` that has adapters."""
    mix, dtype = context.adapters, context.dtype
    if mix is None or not mix.chances:
        return []
    adapted = [target for target in targets if mix.modules is None or target.name in mix.modules]
    products = [product for target in adapted for product in _products(target, mix, dtype)]
    return [OperatorNode(own.name, 1, Depends.ADAPTERS, partial(_work, own, mix, dtype)) for own in products]


def _products(target: AdapterTarget, mix: AdapterMix, dtype: str) -> Iterator[_Product]:
    name, num_in, widths = target
    slices, size, is_sampled = len(widths), bytes_per_weight(dtype), name == "lm_head"
    sums = slices * mix.rank * _SUM_BYTES

    def shrink_blocks(rows: int) -> int:
        splits = _MANY_SPLITS if rows < _FEW_ROWS else _FEW_SPLITS
        return splits * ceil(rows / _SHRINK_TILE[0]) * ceil(mix.rank / _SHRINK_TILE[1]) * slices

    def expand_blocks(rows: int) -> int:
        return ceil(rows / _EXPAND_ROWS) * ceil(max(widths) / _EXPAND_COLUMNS[slices > 1]) * slices

    if name != "embed_tokens":  # whose rows of A are looked up
        yield _Product(f"{name}_shrink", slices * num_in, num_in * size + 2 * sums, shrink_blocks, 2, is_sampled)
    yield _Product(f"{name}_expand", sum(widths), sums + 2 * sum(widths) * size, expand_blocks, 1, is_sampled)


def _work(product: _Product, mix: AdapterMix, dtype: str, shape: BatchShape) -> Work:
    num_adapters, num_tokens = mix.of(shape)
    rows = shape.num_samples if product.is_sampled else shape.num_tokens
    num_tokens = min(num_tokens, rows)
    num_kernels, num_items = product.num_kernels, product.blocks(rows) * (mix.num_slots + 1.0)
    if not mix.is_grouped:
        num_kernels, num_items = _LOOP_KERNELS * ceil(num_adapters), num_adapters
    return Work(
        product.name,
        "lora",
        flops=2.0 * num_tokens * mix.rank * product.weights,
        rate=dtype,
        weight_bytes=num_adapters * mix.rank * product.weights * bytes_per_weight(dtype),
        activation_bytes=num_tokens * product.row_bytes,
        num_kernels=num_kernels if num_adapters else 0,
        problem=AdapterSize(num_items),
    )
