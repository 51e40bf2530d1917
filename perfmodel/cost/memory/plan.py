"""The memory plan: what a device holds, and how many KV blocks remain, as vLLM sizes them.

    blocks = floor( (utilization x visible memory - weights - activations - reserve - graphs - states) / block bytes )

at the pipeline stage, or the device of a layer split, with the fewest. With CPU-offloaded layers (`n_gpu_layers`) the
plan covers the device; the host holds the rest, with their KV. CUDA graphs count inside the share from vLLM 0.21 on;
before, they were captured in what it leaves. With groups (`perfmodel.cost.memory.groups`) a block has the layers of one
group. Beside feed-forward devices (`afd_config`) the plan is of an attention rank, with their weights taken out; these
have to fit there. Not modelled: fragmentation, memory of other processes, an encoder's activations."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from numpy.typing import NDArray

from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.cost.memory.adapters import slot_bytes
from perfmodel.cost.memory.footprint import (
    activation_bytes,
    draft_footprint,
    is_rolling,
    kv_bytes_per_token,
    rolling_bytes_per_sequence,
    rotary_table_bytes,
    state_bytes_per_sequence,
    weights,
)
from perfmodel.cost.memory.groups import largest_share, layer_groups, state_blocks
from perfmodel.errors import DoesNotFitError
from perfmodel.kv_groups import KVGroup, most_rows
from perfmodel.models.architecture import Attention, CompressedAttention, LatentAttention, Layer
from perfmodel.models.number_formats import surplus_tokens
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import on_device, served_model
from perfmodel.ops.graphs.ffn_devices import FFN_COMPONENTS, engine_of_ffn
from perfmodel.ops.sharding import Sharding, stages
from perfmodel.renderable import Renderable, columns_of
from perfmodel.specs.engine.devices import heads_divide
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

# cuBLAS's workspace as PyTorch sets it from Hopper on (aten/src/ATen/cuda/CublasHandlePool.cpp).
_RESERVE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryPlan(Renderable):
    """Bytes on the device that limits the KV cache; `str()` prints the layout.

    usable_bytes:  gpu_memory_utilization x what a process sees of the device
    weights:       bytes by component
    rotary_table_bytes: of the cosines and sines of all positions, where the engine keeps them
    graph_bytes:   of CUDA graphs, where they count in the share
    state_bytes:   recurrent states of `max_num_seqs` sequences, where they are not KV blocks
    num_kv_blocks: blocks of `block_size` tokens, each of all layers that keep all tokens (or of all, where none does);
                   with groups, of the layers of any one of them
    kv_bytes_per_token: of a token in a block
    rolling_span:  tokens that a sequence holds blocks for at most, None if for all
    kv_groups:     groups of layers that each have blocks of their own for a sequence; none: all share them"""

    model: str
    hardware: str
    num_devices: int
    visible_bytes: float
    usable_bytes: float
    weights: dict[str, float]
    activation_bytes: float
    reserve_bytes: float
    graph_bytes: float
    state_bytes_per_sequence: float
    state_bytes: float
    kv_bytes_per_token: float
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    rolling_span: int | None = None
    rotary_table_bytes: float = 0.0
    longest: int = 0  # context that the engine allows
    num_buffers: int = 0  # blocks' worth of room that a sequence holds beside those of its tokens
    reserved_tokens: int | None = None  # of each sequence, where its room is set apart at once
    kv_groups: tuple[KVGroup, ...] = ()

    @property
    def parts(self) -> list[tuple[str, float]]:
        """(name, bytes) of everything on the device, KV blocks last, zeros left out."""
        parts = [
            *((f"weights: {name.replace('_', ' ')}", size) for name, size in self.weights.items()),
            ("activations", self.activation_bytes),
            ("reserve", self.reserve_bytes),
            ("rotary table", self.rotary_table_bytes),
            ("CUDA graphs", self.graph_bytes),
            (f"states of {self.max_num_seqs} sequences", self.state_bytes),
            ("KV blocks", self.kv_bytes),
        ]
        return [(name, size) for name, size in parts if size]

    def columns(self) -> dict[str, NDArray[Any]]:
        """`parts` as arrays: part, bytes."""
        return columns_of([{"part": name, "bytes": size} for name, size in self.parts])

    @property
    def weight_bytes(self) -> float:
        return sum(self.weights.values())

    @property
    def workspace_bytes(self) -> float:
        """Bytes of a step's workspace: all but weights, states and KV blocks."""
        return self.activation_bytes + self.rotary_table_bytes + self.reserve_bytes + self.graph_bytes

    @property
    def kv_bytes(self) -> float:
        return self.num_kv_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def max_tokens(self) -> int:
        """KV cache capacity in tokens of sequences that every group keeps in full, as vLLM logs it."""
        return self.num_kv_blocks // max(1, len(self.kv_groups)) * self.block_size

    def max_batch(self, context: int) -> int:
        """Sequences of `context` tokens that fit at once; `max_num_seqs` counts only where states were reserved."""
        held = context if self.rolling_span is None else min(context, self.rolling_span)
        held = held if self.reserved_tokens is None else max(held, self.reserved_tokens)
        rows = -(-held // self.block_size)
        blocks = most_rows(self.kv_groups, rows, self.block_size) if self.kv_groups else rows + self.num_buffers
        batch = self.num_kv_blocks // max(1, blocks)
        return min(batch, self.max_num_seqs) if self.state_bytes else batch

    def max_context(self, batch: int = 1) -> int:
        """The longest context for `batch` sequences at once."""
        if self.kv_groups:
            return self._max_rows(self.num_kv_blocks // batch) * self.block_size
        context = max(self.num_kv_blocks // batch - self.num_buffers, 0) * self.block_size
        has_no_limit = self.rolling_span is not None and context >= self.rolling_span
        return max(context, self.longest) if has_no_limit else context

    def _max_rows(self, num_blocks: int) -> int:
        """Most block-table rows of a sequence in `num_blocks` blocks; those of `longest` if nothing limits them."""
        longest = -(-self.longest // self.block_size)
        most = max(num_blocks, longest)
        if most_rows(self.kv_groups, most, self.block_size) <= num_blocks:
            return longest
        rows = range(1, most + 1)
        return bisect_left(rows, True, key=lambda n: most_rows(self.kv_groups, n, self.block_size) > num_blocks)


def plan_memory(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec | None = None) -> MemoryPlan:
    """The plan of `model` under `engine` on devices of `hardware`.

    Raises DoesNotFitError, with the bytes needed and the smallest tensor_parallel_size that fits, if no KV block fits.
    """
    engine = engine or EngineSpec()
    plan, fits = _limiting_plan(model, hardware, engine)
    if not fits:
        raise DoesNotFitError(_does_not_fit(plan, model, hardware, engine))
    if engine.afd_config is not None:
        needed, count = plan.reserve_bytes, engine.afd_config.num_ffn_devices
        needed += sum(ffn_device_weights(model, hardware, engine).values())
        if needed > plan.usable_bytes:
            raise DoesNotFitError(
                f"{hardware.name} has {plan.usable_bytes / 1e9:.1f} GB for the engine; a feed-forward device needs "
                f"{needed / 1e9:.1f} GB at {count} of them. Raise engine.afd_config.num_ffn_servers."
            )
    return plan


def ffn_device_weights(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> dict[str, float]:
    """Bytes of weights on a feed-forward device of `engine.afd_config`, by component."""
    assert engine.afd_config is not None
    model = served_model(on_device(model, hardware), engine, hardware)
    shard = Sharding.of(engine_of_ffn(engine, engine.afd_config))
    held = weights(model, shard, list(model.iter_layers()), is_first=False, is_last=False)
    return {name: size for name, size in held.items() if name in FFN_COMPONENTS}


def smallest_fitting_tp(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> int | None:
    """The smallest tensor_parallel_size above the engine's that fits, or None up to 64 devices."""
    for tp in (1, 2, 4, 8, 16, 32, 64):
        if tp <= engine.tensor_parallel_size or not heads_divide(model, tp):
            continue
        wider = engine.model_copy(update={"tensor_parallel_size": tp})
        if _limiting_plan(model, hardware, wider)[1]:
            return tp
    return None


def _limiting_plan(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> tuple[MemoryPlan, bool]:
    """The plan of the stage with the fewest blocks, and whether one fits."""
    model, shard = served_model(on_device(model, hardware), engine, hardware), Sharding.of(engine)
    layers, groups = list(model.iter_layers()), layer_groups(model, hardware, engine)
    states = None if groups else state_blocks(model, hardware, engine)
    drafter = draft_footprint(model, engine)
    # Engines with CPU offload load no embedding table to a device (llama.cpp, `dev_input` in src/llama-model.cpp).
    has_table = hardware.kind == "cpu" or not engine.described.facts.offloads_from_tokens
    plans, first = [], 0
    for stage, is_first, is_last in _parts(layers, engine):
        held = weights(model, shard, stage, is_first=is_first, is_last=is_last, has_table=has_table)
        if engine.afd_config is not None:
            held = {name: size for name, size in held.items() if name not in FFN_COMPONENTS}
        if drafter.weight_bytes:
            held["drafter"] = drafter.weight_bytes
        if engine.enable_lora:
            held["LoRA slots"] = slot_bytes(model, engine, stage, has_vocabulary=is_first) * engine.max_loras
        per_token = 0.0
        tables = states.groups if states is not None else groups
        if tables:
            # A block has room for the stage's part of the largest group.
            with_keys = next(layer for layer in layers if isinstance(layer.mixer, Attention | LatentAttention))
            share = largest_share(tables, range(first, first + len(stage)))
            per_token = share * kv_bytes_per_token(model, shard, [with_keys])
        elif engine.kv_cache != "off":
            per_token = kv_bytes_per_token(model, shard, stage) + drafter.kv_bytes_per_token
        first += len(stage)
        if engine.mm_encoder_only:
            held, per_token = {"other": held.get("other", 0.0)}, 0.0
        in_blocks = engine.mm_encoder_only or states is not None or compressed_blocks(model, engine) > 0
        per_sequence = 0.0 if in_blocks else state_bytes_per_sequence(model, shard, stage)
        plan = MemoryPlan(
            model=model.name,
            hardware=hardware.name,
            num_devices=engine.num_devices,
            visible_bytes=hardware.visible_memory_bytes,
            usable_bytes=engine.gpu_memory_utilization * hardware.visible_memory_bytes,
            weights=held,
            activation_bytes=activation_bytes(model, shard, engine),
            reserve_bytes=_RESERVE_BYTES + (load_overheads().communicator_bytes if engine.num_devices > 1 else 0.0),
            graph_bytes=_graph_bytes(engine, hardware),
            state_bytes_per_sequence=per_sequence,
            state_bytes=per_sequence * engine.max_num_seqs,
            kv_bytes_per_token=per_token,
            block_size=engine.kv_block_tokens,
            num_kv_blocks=0,
            max_num_seqs=engine.max_num_seqs,
            rolling_span=model.rolling_span,
            rotary_table_bytes=rotary_table_bytes(model, engine),
            longest=_longest(model, engine),
            num_buffers=num_buffers(model, hardware, engine) if per_token else 0,
            reserved_tokens=_reserved(model, engine),
            kv_groups=tuple(group.group for group in groups),
        )
        plans.append(_best_layout(plan, model, engine, shard, stage))
    plan, room = min(plans, key=lambda plan: plan[0].num_kv_blocks)
    return plan, plan.num_kv_blocks >= 1 and room >= 0


def _parts(layers: Sequence[Layer], engine: EngineSpec) -> Iterator[tuple[Sequence[Layer], bool, bool]]:
    """Layers of each device of the pipeline, whether it is first, and whether it holds the head."""
    num_parts, has_head = engine.pipeline_parallel_size * engine.layer_split, True
    first = 0
    if engine.n_gpu_layers is not None:  # the last ones, behind which the head counts as one more
        first = max(0, len(layers) - engine.n_gpu_layers)
        has_head = engine.n_gpu_layers > len(layers)
    for index, span in enumerate(stages(len(layers) - first, num_parts)):
        part = layers[first + span.start : first + span.stop]
        yield part, index == 0, index == num_parts - 1 and has_head


def num_buffers(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> int:
    """Blocks per sequence beside its tokens': states, or newer tokens in wider formats. model: as served"""
    states = state_blocks(model, hardware, engine)
    others = ceil(surplus_tokens(model) / engine.block_size) + compressed_blocks(model, engine)
    return states.per_sequence if states is not None else others


def compressed_blocks(model: ModelSpec, engine: EngineSpec) -> int:
    """Blocks' worth of windows and compressor states that a sequence holds beside its compressed keys; vLLM takes them
    from the same pool, as groups with a window (vllm/v1/kv_cache_interface.py, SlidingWindowMLASpec)."""
    layers, shard = list(model.iter_layers()), Sharding.of(engine)
    has_keys = any(isinstance(layer.mixer, CompressedAttention) and layer.mixer.ratio for layer in layers)
    if not has_keys or engine.kv_cache != "paged":
        return 0
    block_bytes = engine.block_size * kv_bytes_per_token(model, shard, layers)
    return ceil(state_bytes_per_sequence(model, shard, layers) / block_bytes)


def _graph_bytes(engine: EngineSpec, hardware: HardwareSpec) -> float:
    """CUDA graphs inside the share, else 0. Start-up logs scatter by 40 %; with experts they estimate far more."""
    is_inside = engine.described.facts.graphs.inside_memory_share and hardware.kind == "gpu"
    if not is_inside or not engine.num_graphs:
        return 0.0
    fits = load_overheads()
    return fits.graph_pool_bytes + fits.graph_bytes * engine.num_graphs


def _reserved(model: ModelSpec, engine: EngineSpec) -> int | None:
    """Tokens reserved per request whatever its length, if they are."""
    is_fixed = engine.kv_cache == "contiguous" and not engine.reserve_output
    return min(_longest(model, engine), model.rolling_span or _longest(model, engine)) if is_fixed else None


def _longest(model: ModelSpec, engine: EngineSpec) -> int:
    return engine.max_model_len or model.max_position_embeddings


def _best_layout(
    plan: MemoryPlan, model: ModelSpec, engine: EngineSpec, shard: Sharding, stage: Sequence[Layer]
) -> tuple[MemoryPlan, float]:
    """Rolling layers in equal blocks, or in own buffers for `max_num_seqs` sequences, whichever holds more tokens."""
    in_blocks = _with_blocks(plan, model, engine)
    if model.rolling_span is not None or not any(is_rolling(layer) for layer in stage):
        return in_blocks
    buffers = rolling_bytes_per_sequence(model, shard, stage, _longest(model, engine))
    per_sequence = plan.state_bytes_per_sequence + buffers
    apart = replace(
        plan,
        state_bytes_per_sequence=per_sequence,
        state_bytes=per_sequence * engine.max_num_seqs,
        kv_bytes_per_token=plan.kv_bytes_per_token - kv_bytes_per_token(model, shard, list(filter(is_rolling, stage))),
    )
    in_buffers = _with_blocks(apart, model, engine)
    return in_buffers if in_buffers[0].num_kv_blocks > in_blocks[0].num_kv_blocks else in_blocks


def _with_blocks(plan: MemoryPlan, model: ModelSpec, engine: EngineSpec) -> tuple[MemoryPlan, float]:
    room = plan.usable_bytes - plan.weight_bytes - plan.workspace_bytes - plan.state_bytes
    if engine.num_gpu_blocks_override is not None:
        blocks = engine.num_gpu_blocks_override
    elif plan.kv_bytes_per_token:
        blocks = int(max(0.0, room) // (plan.block_size * plan.kv_bytes_per_token))
    else:  # no layer on this stage keeps keys: blocks only count tokens, and all sequences may be as long as allowed
        blocks = engine.max_num_seqs * -(-plan.longest // plan.block_size)
    return replace(plan, num_kv_blocks=blocks), room


def _does_not_fit(plan: MemoryPlan, model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> str:
    tp, needed = engine.tensor_parallel_size, plan.weight_bytes
    what = "the weights need"
    if plan.usable_bytes >= needed:  # the weights alone would fit
        needed += plan.workspace_bytes + plan.state_bytes + plan.block_size * plan.kv_bytes_per_token
        what = "weights, activations and one KV block need"
    has = f"{hardware.name} has {hardware.memory_bytes / 1e9:.1f} GB"
    if not 0.999 < plan.visible_bytes / hardware.memory_bytes < 1.001:  # "80 GB" of 80 GiB
        has += f" by its datasheet, {plan.visible_bytes / 1e9:.1f} GB as a process sees it"
    if plan.usable_bytes < 0.999 * plan.visible_bytes:
        share = f"gpu_memory_utilization={engine.gpu_memory_utilization:g}"
        has += f", of which the engine may use {plan.usable_bytes / 1e9:.1f} GB ({share})"
    fitting = None if hardware.is_slice else smallest_fitting_tp(model, hardware, engine)
    if hardware.is_slice:
        way_out = "Take a larger slice, or the whole GPU; or quantize the model."
    elif fitting is None:
        way_out = "No tensor_parallel_size up to 64 fits; quantize the model, or take devices with more memory."
    else:
        way_out = f"Smallest that fits: {fitting}."
    return f"{has}; {what} {needed / 1e9:.1f} GB per device at tensor_parallel_size={tp}. {way_out}"
