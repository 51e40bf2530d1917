"""KV cache groups: layers that share a block table, as an engine's hybrid KV cache manager forms them.

Groups have equally many layers of one kind (full attention, a window, a chunk): as many as the smallest kind has, or
the largest, if that is less than `pads_below` times as many. Group i of n has the kind's layers i, i + n and so on, so
that each pipeline stage has a share. Blocks have the size of the largest group; smaller ones waste the rest:
Gemma-3-27B's 52 windowed and 10 full layers are 7 groups of 10, 70 places for 62 layers.

States of Mamba and linear attention are blocks, too: one per sequence in each group of such layers, padded to the block
size. For that vLLM enlarges attention blocks to a state's size (784 tokens for Qwen3.5-27B); here a state is several
blocks of `block_size` tokens, and the mean waste of a sequence's last large block is added.

No groups if layers' blocks differ in size (other heads), or a drafter brings layers of its own. The switch
(`disable_hybrid_kv_cache_manager`) concerns mixtures: layers with one common window share a table that keeps no more.
With it, states are set apart (vLLM itself does not start then).
Source: vllm-project/vllm, vllm/v1/core/kv_cache_utils.py (_get_kv_cache_groups_uniform_page_size) and
vllm/config/vllm.py (what disables the manager: platforms without it, as TPUs; KV connectors that cannot tell groups
apart)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from perfmodel.cost.memory.footprint import kv_bytes_per_token, state_bytes_per_sequence
from perfmodel.kv_groups import KVGroup
from perfmodel.models.architecture import Attention, GatedDeltaNet, LatentAttention, Mamba, Mixer
from perfmodel.models.number_formats import surplus_tokens
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.description import KvGroupRules
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

_PLATFORMS = ("gpu", "cpu")  # whose `support_hybrid_kv_cache` says so, of vLLM's (0.30: vllm/platforms)
Kind = tuple[int | None, bool]  # how far a query sees, and whether in chunks


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A group and its layers (model layer numbers from 0)."""

    group: KVGroup
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """Recurrent states in the pool of KV blocks.

    groups:     of layers with keys, and with states; per_sequence: blocks per sequence beside its tokens'
    block_size: tokens of an attention block as the engine makes it"""

    groups: tuple[LayerGroup, ...]
    per_sequence: int
    block_size: int


def state_blocks(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> StateBlocks | None:
    """KV blocks of the states of `model`, as served; None if states are not in blocks.

    m = ceil( bytes of a layer's state / (b bytes of a token in an attention layer) )     blocks of b tokens"""
    rules = engine.described.facts.kv_groups
    is_off = "state" not in rules.kinds or engine.disable_hybrid_kv_cache_manager
    if is_off or hardware.kind not in _PLATFORMS or not _can_have_groups(model, engine):
        return None
    layers = list(enumerate(model.iter_layers()))
    keys = [i for i, layer in layers if isinstance(layer.mixer, Attention | LatentAttention)]
    states = [i for i, layer in layers if isinstance(layer.mixer, Mamba | GatedDeltaNet)]
    shard, mixers = Sharding.of(engine), [layer.mixer for _, layer in layers]
    if not keys or not states or len({mixers[i] for i in keys}) > 1 or len({mixers[i] for i in states}) > 1:
        return None
    groups = _cut({(None, False): keys, (0, False): states}, rules.pads_below)
    if sum(group.layers <= set(keys) for group in groups) != 1:
        return None
    size = engine.block_size
    token = kv_bytes_per_token(model, shard, [layers[keys[0]][1]])
    times = ceil(state_bytes_per_sequence(model, shard, [layers[states[0]][1]]) / (size * token))
    return StateBlocks(groups, (len(groups) - 1) * times + (times - 1) // 2, size * times)


def kv_groups(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> tuple[KVGroup, ...]:
    """The groups of `model` under `engine` on `hardware`; none where all layers share one table."""
    return tuple(group.group for group in layer_groups(served_model(model, engine), hardware, engine))


def layer_groups(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> tuple[LayerGroup, ...]:
    """The groups of `model`, as served, with their layers."""
    rules = engine.described.facts.kv_groups
    if not rules.kinds or hardware.kind not in _PLATFORMS or not _can_have_groups(model, engine):
        return ()
    mixers = [layer.mixer for layer in model.iter_layers()]
    with_keys = {i: mixer for i, mixer in enumerate(mixers) if isinstance(mixer, Attention | LatentAttention)}
    kinds: dict[Kind, list[int]] = {}
    for number, mixer in with_keys.items():
        kinds.setdefault(_kind(mixer, rules, engine.block_size), []).append(number)
    sizes = {_elements(mixer) for mixer in with_keys.values()}
    is_mixed = len(kinds) > 1
    if len(sizes) != 1 or set(kinds) == {(None, False)} or (is_mixed and engine.disable_hybrid_kv_cache_manager):
        return ()
    return _cut(kinds, rules.pads_below)


def _can_have_groups(model: ModelSpec, engine: EngineSpec) -> bool:
    """Whether blocks are allocated as tokens come, for the model's own layers only, and stay in place."""
    drafter = engine.speculative_config
    has_own_layers = drafter is not None and drafter.method in ("draft_model", "eagle") and not drafter.has_own_device
    is_paged = engine.kv_cache == "paged" and engine.batching == "continuous" and not engine.rules.reserves_output
    rolls = any(isinstance(layer.mixer, Attention) and layer.mixer.is_rolling for layer, _ in model.layers)
    is_moved = engine.kv_offload is not None or bool(surplus_tokens(model))
    return is_paged and not (has_own_layers or rolls or is_moved)


def _kind(mixer: Mixer | None, rules: KvGroupRules, block_size: int) -> Kind:
    if isinstance(mixer, Attention) and mixer.sparsity is None and mixer.evicts_to is None:
        if mixer.window is not None and "window" in rules.kinds:
            return mixer.window, False
        if mixer.chunk is not None and "chunk" in rules.kinds and not mixer.chunk % block_size:
            return mixer.chunk, True
    return None, False


def _elements(mixer: Attention | LatentAttention) -> tuple[int, int]:
    """KV heads, and elements of a token in each: what block size depends on."""
    if isinstance(mixer, Attention):
        return mixer.num_kv_heads, mixer.head_dim + mixer.v_head_dim
    index_size = mixer.indexer.head_dim if mixer.indexer is not None and not mixer.indexer.is_shared else 0
    return 0, mixer.kv_lora_rank + mixer.qk_rope_head_dim + index_size


def _cut(kinds: dict[Kind, list[int]], pads_below: float) -> tuple[LayerGroup, ...]:
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most < pads_below * fewest else fewest
    groups = []
    for (span, is_chunk), layers in sorted(kinds.items(), key=lambda item: item[0][0] is not None):
        count = -(-len(layers) // size)
        for i in range(count):
            share = layers[i::count]
            groups.append(LayerGroup(KVGroup(len(share), span, is_chunk), frozenset(share)))
    return tuple(groups)


def largest_share(groups: Sequence[LayerGroup], layers: range) -> int:
    """Layers of the largest group among `layers`: those a block has room for on their device."""
    return max((len(group.layers.intersection(layers)) for group in groups), default=0)
