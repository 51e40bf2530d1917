"""`OperatorNode`: an operator's place in a model; `LayerContext`: what all nodes of a device share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfmodel.models.architecture import QuantizationSpec
from perfmodel.models.number_formats import bytes_per_weight, kv_element_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.attention.decode import ContextSpread
from perfmodel.ops.formats import LinearFormat, linear_format
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import AdapterMix, BatchShape, Depends, Work
from perfmodel.specs.engine.description import ExpertsRow, LatentPromptsRow


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """An operator that runs `count` times per step on the device that sets the time.

    `work` maps the whole step's shape to one run's work; it reads only the fields that `depends` names. `runs`:
    expected number of the `count` runs, under early exit."""

    name: str
    count: int
    depends: Depends
    work: Callable[[BatchShape], Work]
    runs: Callable[[BatchShape], float] | None = None

    def expected_runs(self, shape: BatchShape) -> float:
        """Expected runs in a step of `shape`."""
        return self.count if self.runs is None else self.runs(shape)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The model as served, its sharding and the engine's kernels.

    is_fused:        serving engines' kernels, not one per PyTorch operator
    concatenates_kv: the cache grows by concatenation
    experts:         how the engine runs routed experts, if described
    sparse_heads:    heads per tile of the sparse prefill kernel
    latent_prompts:  the kernel of prompts over latents, where it is not that of heads of their size"""

    model: ModelSpec
    shard: Sharding
    is_fused: bool = True
    is_flash: bool = True
    splits_kv: bool = True
    flash_version: int | None = None
    concatenates_kv: bool = False
    routing: Routing = slowest_uniform_routing
    spread: ContextSpread | None = None
    experts: ExpertsRow | None = None
    sparse_heads: int = 1
    latent_prompts: LatentPromptsRow | None = None
    formats: tuple[tuple[str, QuantizationSpec], ...] = ()  # the layer's own, by component
    adapters: AdapterMix | None = None

    @property
    def hidden(self) -> int:
        return self.model.hidden_size

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @property
    def element_bytes(self) -> float:
        return bytes_per_weight(self.model.dtype)

    @property
    def kv_element_bytes(self) -> float:
        """Bytes of a cached element of the oldest tier; newer ones may take more (`kv_surplus`)."""
        quantization = self.model.quantization
        return kv_element_bytes(quantization.kv_cache or self.model.dtype, quantization.kv_group_size)

    def format(self, component: str) -> LinearFormat:
        return linear_format(self.model, component, dict(self.formats).get(component))


def on_tokens(name: str, work: Callable[[int], Work]) -> OperatorNode:
    """A node whose work depends on the number of tokens."""
    return OperatorNode(name, 1, Depends.TOKENS, lambda shape: work(shape.num_tokens))


def on_rows(name: str, work: Callable[[int, int], Work]) -> OperatorNode:
    """A node whose work depends on the number of tokens, and how many of them decode."""
    return OperatorNode(name, 1, Depends.ROWS, lambda shape: work(shape.num_tokens, shape.num_decodes))


def on_group(name: str, work: Callable[[int], Work], num_ranks: int) -> OperatorNode:
    """A node whose work depends on the tokens of all `num_ranks` data-parallel ranks."""
    if num_ranks == 1:
        return on_tokens(name, work)
    return OperatorNode(name, 1, Depends.GROUP, lambda shape: work(shape.group_tokens or num_ranks * shape.num_tokens))


def on_samples(name: str, work: Callable[[int], Work]) -> OperatorNode:
    """A node whose work depends on the number of sampled sequences."""
    return OperatorNode(name, 1, Depends.SAMPLES, lambda shape: work(shape.num_samples))


def on_prefills(name: str, work: Callable[[Sequence[tuple[int, int]]], Work]) -> OperatorNode:
    """A node whose work depends on the prefills."""
    return OperatorNode(name, 1, Depends.PREFILL, lambda shape: work(shape.prefills))


def on_mixed(name: str, work: Callable[[Sequence[tuple[int, int]], int, int, float], Work]) -> OperatorNode:
    """A node whose work depends on prefills and decodes (see `on_decodes`) of a step with both."""

    def run(shape: BatchShape) -> Work:
        return work(shape.prefills, shape.num_decodes, shape.decode_context, shape.queries_per_decode)

    return OperatorNode(name, 1, Depends.MIXED, run)


def on_decodes(name: str, work: Callable[[int, int, float], Work], span_index: int | None = None) -> OperatorNode:
    """A node whose work depends on the number of decodes, their visible context, and the queries of each.

    `span_index` picks the entry of `decode_windowed` for a layer with a limited span."""

    def run(shape: BatchShape) -> Work:
        if span_index is None or shape.num_decodes == 0:
            return work(shape.num_decodes, shape.decode_context, shape.queries_per_decode)
        return work(shape.num_decodes, shape.decode_windowed[span_index], shape.queries_per_decode)

    return OperatorNode(name, 1, Depends.DECODE, run)
