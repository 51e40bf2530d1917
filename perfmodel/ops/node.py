"""`OperatorNode`: an operator as it stands in a model, and what is common to all nodes of one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfmodel.models.architecture import QuantizationSpec
from perfmodel.models.number_formats import bytes_per_weight, kv_element_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.attention.decode import ContextSpread
from perfmodel.ops.formats import LinearFormat, linear_format
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, Depends, Work
from perfmodel.specs.engine.description import ExpertsRow


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """An operator that runs `count` times per step on the device that sets the time.

    `work` maps the shape of the whole step to the work of one run on one device; it reads only the fields of the shape
    that `depends` names. `runs`: how many of `count` are expected to take place, where tokens may leave them out.
    """

    name: str
    count: int
    depends: Depends
    work: Callable[[BatchShape], Work]
    runs: Callable[[BatchShape], float] | None = None

    def expected_runs(self, shape: BatchShape) -> float:
        """`count`, or as many of them as a step of `shape` needs."""
        return self.count if self.runs is None else self.runs(shape)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What every layer needs to know: the model as served, how it is cut, which kernels run.

    is_fused:        kernels of serving engines; otherwise one per operator of plain PyTorch modules
    concatenates_kv: the cache grows by a copy of all of it
    experts:         how the engine runs routed experts, where its description says
    sparse_heads:    heads of a tile of the kernel for prompts with an indexer
    """

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
    formats: tuple[tuple[str, QuantizationSpec], ...] = ()  # the layer's own, by component

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
        """Bytes of a cached element of the oldest tokens, which may take less than newer ones (`kv_surplus`)."""
        quantization = self.model.quantization
        return kv_element_bytes(quantization.kv_cache or self.model.dtype, quantization.kv_group_size)

    def format(self, component: str) -> LinearFormat:
        return linear_format(self.model, component, dict(self.formats).get(component))


def on_tokens(name: str, work: Callable[[int], Work]) -> OperatorNode:
    """A node whose work is a function of the number of tokens."""
    return OperatorNode(name, 1, Depends.TOKENS, lambda shape: work(shape.num_tokens))


def on_group(name: str, work: Callable[[int], Work], num_ranks: int) -> OperatorNode:
    """A node whose work is a function of the tokens of all `num_ranks` data-parallel ranks together."""
    if num_ranks == 1:
        return on_tokens(name, work)
    return OperatorNode(name, 1, Depends.GROUP, lambda shape: work(shape.group_tokens or num_ranks * shape.num_tokens))


def on_samples(name: str, work: Callable[[int], Work]) -> OperatorNode:
    """A node whose work is a function of the number of sequences to sample."""
    return OperatorNode(name, 1, Depends.SAMPLES, lambda shape: work(shape.num_samples))


def on_prefills(name: str, work: Callable[[Sequence[tuple[int, int]]], Work]) -> OperatorNode:
    """A node whose work is a function of the prefills."""
    return OperatorNode(name, 1, Depends.PREFILL, lambda shape: work(shape.prefills))


def on_mixed(name: str, work: Callable[[Sequence[tuple[int, int]], int, int, float], Work]) -> OperatorNode:
    """A node whose work is a function of the prefills and the decodes (see `on_decodes`) of a step that has both."""

    def run(shape: BatchShape) -> Work:
        return work(shape.prefills, shape.num_decodes, shape.decode_context, shape.queries_per_decode)

    return OperatorNode(name, 1, Depends.MIXED, run)


def on_decodes(name: str, work: Callable[[int, int, float], Work], span_index: int | None = None) -> OperatorNode:
    """A node whose work is a function of the number of decodes, their visible context, and the queries of each.

    `span_index` picks the entry of `decode_windowed` that is the context of a layer with a limited span.
    """

    def run(shape: BatchShape) -> Work:
        if span_index is None or shape.num_decodes == 0:
            return work(shape.num_decodes, shape.decode_context, shape.queries_per_decode)
        return work(shape.num_decodes, shape.decode_windowed[span_index], shape.queries_per_decode)

    return OperatorNode(name, 1, Depends.DECODE, run)
