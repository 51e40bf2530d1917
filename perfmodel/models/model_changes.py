"""`ModelChanges`: what a scenario changes in its model before it is served: other attention, fewer or shared weights.

Each field is one technique of the literature (docs/techniques has a page for each); what is left out changes nothing.
The changes themselves are functions in `perfmodel.models.changes`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from perfmodel.files.base import CheckedSpec, Spec
from perfmodel.files.units import NonNegativeInt, PositiveInt

Share = Annotated[float, Field(gt=0, le=1)]


class LatentChange(Spec):
    """Multi-head latent attention with the model's own number of heads; sizes left out are the model's head size."""

    kv_lora_rank: PositiveInt
    qk_rope_head_dim: PositiveInt = 64
    qk_nope_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = None


class SparseAttention(CheckedSpec):
    """Block-sparse attention: a query's block sees some blocks of `block` tokens before it.

    windows, globals, random: blocks next to it, at the beginning, anywhere; BigBird's and Longformer's patterns
    fraction:                 instead of counts: this share of the blocks that it could see"""

    pattern: Literal["bigbird", "longformer"] = "bigbird"
    block: PositiveInt = 64
    windows: PositiveInt | None = None
    globals: NonNegativeInt | None = None
    random: NonNegativeInt | None = None
    fraction: Share | None = None

    def _conflicts(self) -> Iterator[str]:
        counts = [name for name in ("windows", "globals", "random") if getattr(self, name) is not None]
        if self.fraction is not None and counts:
            yield f"got fraction beside {', '.join(counts)}; give a share of the blocks or their counts"
        if self.fraction is None and self.windows is None:
            yield "got neither fraction nor windows; give a share of the blocks or their counts"
        if self.pattern == "longformer" and self.random:
            yield f"got random={self.random} with longformer, which has none; use bigbird or leave it out"


class LinearChange(Spec):
    """Attention whose state does not grow: Performer's random features, or Linformer's projected keys and values.

    size: features (Performer) or projected rows (Linformer) per head"""

    kind: Literal["performer", "linformer"]
    size: PositiveInt = 256


class SsmLayers(Spec):
    """Mamba-2 instead of attention in all layers, or in all but every `attention_every`-th (Jamba: 8)."""

    attention_every: Annotated[int, Field(ge=2)] | None = None
    state_size: PositiveInt = 128
    head_dim: PositiveInt = 64
    expand: PositiveInt = 2
    num_groups: PositiveInt = 1
    conv_kernel: PositiveInt = 4
    chunk_size: PositiveInt = 256


class Prune(CheckedSpec):
    """Weights that are left out.

    unstructured: single weights; `storage: sparse` stores the others with an index each, else the zeros stay
    structured:   heads and feed-forward columns; 2:4: half of every four, for sparse tensor cores
    layers:       whole layers, evenly spaced"""

    kind: Literal["unstructured", "structured", "layers", "2:4"]
    fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    storage: Literal["dense", "sparse"] = "dense"

    def _conflicts(self) -> Iterator[str]:
        if self.kind == "2:4" and self.fraction not in (None, 0.5):
            yield f"got fraction={self.fraction:g} with 2:4, which is 0.5; leave it out"
        if self.kind != "2:4" and self.fraction is None:
            yield f"kind: {self.kind} needs fraction; give the share that is left out, as in 0.25"
        if self.kind != "unstructured" and self.storage == "sparse":
            yield f"got storage=sparse with {self.kind}; only unstructured pruning has a choice"


class LowRank(CheckedSpec):
    """Two thin matrices for each: inputs to `rank`, `rank` to outputs; or that keep `fraction` of the weights."""

    rank: PositiveInt | None = None
    fraction: Share | None = None
    components: tuple[Literal["attention", "dense_ffn"], ...] = ("attention", "dense_ffn")

    def _conflicts(self) -> Iterator[str]:
        if (self.rank is None) == (self.fraction is None):
            given = "both rank and fraction" if self.rank is not None else "neither rank nor fraction"
            yield f"got {given}; give one of them"


class EarlyExit(CheckedSpec):
    """A token leaves the model once it is sure enough of what comes next (decodes only; prompts pass all layers).

    expected_share:     layers that a token passes on average, as a share; it leaves each with equal probability
    exit_probabilities: instead: for each layer, the share of all tokens that leave behind it (the rest stays)
    confidence:         how it knows: a small classifier (no cost is counted), or the LM head after every layer"""

    expected_share: Share | None = None
    exit_probabilities: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = None
    confidence: Literal["classifier", "softmax"] = "classifier"

    def _conflicts(self) -> Iterator[str]:
        if (self.expected_share is None) == (self.exit_probabilities is None):
            given = "both" if self.expected_share is not None else "neither"
            yield f"got {given} of expected_share and exit_probabilities; give one of them"
        total = sum(self.exit_probabilities or ())
        if total > 1 + 1e-9:
            yield f"got exit_probabilities that sum to {total:g}; shares of all tokens sum to at most 1"


class Moefy(CheckedSpec):
    """Dense feed-forward blocks split into experts of equal width."""

    num_experts: Annotated[int, Field(ge=2)]
    top_k: PositiveInt

    def _conflicts(self) -> Iterator[str]:
        if self.top_k > self.num_experts:
            yield f"got top_k={self.top_k} above num_experts={self.num_experts}; lower it"


class Experts(CheckedSpec):
    """Mixtures of experts of another shape; what is left out stays.

    top_k: experts per token; num_experts: of each block; split: each expert as so many of a part of its width, as many
    times more per token (fine-grained experts, DeepSeekMoE); shared_intermediate_size: width of the shared experts"""

    top_k: PositiveInt | None = None
    num_experts: PositiveInt | None = None
    split: Annotated[int, Field(ge=2)] | None = None
    shared_intermediate_size: NonNegativeInt | None = None

    def _conflicts(self) -> Iterator[str]:
        if not self.model_dump(exclude_none=True):
            yield "is empty; give top_k, num_experts, split or shared_intermediate_size"


class ModelChanges(CheckedSpec):
    """Applied from the first to the last field, whatever their order in the file.

    num_kv_heads: key/value heads that the query heads share
    latent:       MLA instead
    window:       a query sees this many tokens; in every `window_every`-th layer, and `sinks` first tokens beside them
    sparse:       block-sparse attention
    linear:       linear attention instead
    ssm_layers:   Mamba-2 instead of attention
    prune, low_rank, moefy: fewer weights, or fewer per token
    experts:      more, fewer or finer experts
    share_layers: this many distinct layers, used in turn
    tie_embeddings: whether the LM head is the embedding table
    early_exit:   tokens leave before the last layer"""

    num_kv_heads: PositiveInt | None = None
    latent: LatentChange | None = None
    window: PositiveInt | None = None
    window_every: PositiveInt = 1
    sinks: NonNegativeInt = 0
    sparse: SparseAttention | None = None
    linear: LinearChange | None = None
    ssm_layers: SsmLayers | None = None
    prune: Prune | None = None
    low_rank: LowRank | None = None
    moefy: Moefy | None = None
    experts: Experts | None = None
    share_layers: PositiveInt | None = None
    tie_embeddings: bool | None = None
    early_exit: EarlyExit | None = None

    def _conflicts(self) -> Iterator[str]:
        for name in ("sinks", "window_every"):
            if name in self.model_fields_set and self.window is None:
                yield f"got {name}={getattr(self, name)} without window; give the window, too"
