"""Problem sizes: what a kernel model reads of an operator besides FLOPs and bytes, one frozen type per family.

Operators fill them in; `perfmodel.cost.kernel_models` reads them. Tables of measured kernels have the same types, with
a column in each field. An operator with its own kernel model brings its own size: any class with `traits`."""

from math import ceil
from typing import Any, NamedTuple, Protocol

Values = Any  # a number, or a column of them
SPARSE_TILE = 64  # heads of a thread block that attends to chosen keys


class KernelTraits(NamedTuple):
    """What a library chooses the kernel by, and a calibration the fit (`perfmodel.cost.kernel_models.fits.Domain`).

    head_dim:         elements of a key; 0: not attention
    kv_element_bytes: of the cached elements as the kernel multiplies them
    group:            query heads of a KV head
    gates:            2 for experts with a gate, else 1; 0: no experts
    shares_experts:   ranks hold whole experts, some of the model's each"""

    head_dim: float = 0
    kv_element_bytes: float = 0
    group: float = 0
    gates: float = 0
    shares_experts: bool = False


class ProblemSize(Protocol):
    """The sizes of one operator. Some also give `thread_blocks`, those that can run at once, and `num_items`
    (sequences, distinct experts)."""

    @property
    def traits(self) -> KernelTraits | None:
        """What selects the kernel; None: one kernel for all sizes."""


class GemmSize(NamedTuple):
    """Y (m, n) = X (m, k) W (k, n).

    weight_bytes, input_bytes: per element as read, scales included
    quantized_bytes: of the kernel that quantizes the input first, 0 without
    batch:           equal GEMMs in one launch"""

    m: Values
    n: Values
    k: Values
    weight_bytes: float
    input_bytes: float
    quantized_bytes: Values = 0.0
    batch: float = 1.0

    @property
    def traits(self) -> None:
        return None


class HeadShape(NamedTuple):
    """Attention heads on one device, as a kernel sees them.

    head_dim, v_head_dim: elements of a key and of a value
    kv_element_bytes:     per cached element as multiplied
    window:               most keys per query; 0: all"""

    num_heads: Values
    num_kv_heads: Values
    head_dim: Values
    v_head_dim: Values
    kv_element_bytes: Values
    window: Values = 0

    @property
    def head_size(self) -> Values:
        """Elements of a key and a value together."""
        return self.head_dim + self.v_head_dim

    @property
    def group(self) -> Values:
        """Query heads per KV head."""
        return self.num_heads / self.num_kv_heads

    @property
    def traits(self) -> KernelTraits:
        return KernelTraits(self.head_dim, self.kv_element_bytes, self.group)


class PrefillSize(NamedTuple):
    """Attention of prompts in one kernel.

    prefills:  (new tokens, cached tokens) of each prompt
    tokens:    new, all prompts; kv_tokens: distinct visible keys
    pairs:     visible query-key pairs
    has_block_per_head: one thread block per head and prompt (FlashAttention-1)
    is_causal: a token sees those before it; else all of its prompt (encoders)
    chooses_keys: a thread block for each query and 64 heads. Source: FlashMLA, sparse prefill (`B_H`)"""

    heads: HeadShape
    prefills: tuple[tuple[int, int], ...]
    tokens: Values
    kv_tokens: Values
    pairs: Values
    thread_blocks: Values = 0
    has_block_per_head: bool = False
    is_causal: bool = True
    chooses_keys: bool = False

    @property
    def num_items(self) -> Values:
        return self.tokens * ceil(self.heads.num_heads / SPARSE_TILE) if self.chooses_keys else len(self.prefills)

    @property
    def traits(self) -> KernelTraits:
        return self.heads.traits


class DecodeSize(NamedTuple):
    """Attention of one or a few new tokens per sequence over its KV cache.

    kv_tokens: visible, all sequences; longest: of the longest sequence, 0: equal lengths
    queries:   new tokens per sequence
    splits_kv: several thread blocks share the keys of a sequence"""

    heads: HeadShape
    num_seqs: Values
    kv_tokens: Values
    queries: Values = 1.0
    longest: Values = 0.0
    splits_kv: bool = True
    thread_blocks: Values = 0

    @property
    def query_rows(self) -> Values:
        """Query rows per sequence, all heads."""
        return self.queries * self.heads.num_heads

    @property
    def num_items(self) -> Values:
        return self.num_seqs

    @property
    def traits(self) -> KernelTraits:
        return self.heads.traits


class MixedSize(NamedTuple):
    """Attention of prompts and of decodes in one kernel."""

    prompts: PrefillSize
    decodes: DecodeSize

    @property
    def thread_blocks(self) -> Values:
        """Those of the prompts."""
        return self.prompts.thread_blocks

    @property
    def traits(self) -> KernelTraits:
        return self.prompts.traits


class ExpertsSize(NamedTuple):
    """The routed experts of one rank.

    tokens:        that the kernels see: of all ranks that share the experts where they are gathered, else those that
                   arrive, `top_k` rows each; local_experts of num_experts are on this one
    width, inner:  d, and the intermediate size on this rank; gates: 2 with a gate, else 1
    distinct, assignments: experts with tokens, and (token, expert) pairs
    tiles:         sum over experts of ceil(rows / t), for each t in `TILE_ROWS`; empty: not known
    sum_bytes:     of the final sum over a token's experts, all tokens
    weight_bytes, input_bytes: per element as read, scales included"""

    tokens: Values
    top_k: Values
    num_experts: Values
    local_experts: Values
    width: Values
    inner: Values
    gates: Values
    distinct: Values
    assignments: Values
    sum_bytes: Values
    tiles: Values
    weight_bytes: float
    input_bytes: float

    @property
    def num_items(self) -> Values:
        """Experts that get a token."""
        return self.distinct

    @property
    def traits(self) -> KernelTraits:
        return KernelTraits(gates=self.gates, shares_experts=self.local_experts < self.num_experts)
