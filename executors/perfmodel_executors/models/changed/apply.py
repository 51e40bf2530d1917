"""Each change of `model_changes` as what it does to weights; a sentence for those that would need training."""

__all__ = ["WEIGHT_CHANGES", "changed_weights"]

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from perfmodel.errors import PerfmodelError
from perfmodel.models.changes import CHANGES
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ChangedFrom, ModelSpec
from perfmodel_executors.models.changed.pruning import pruned
from perfmodel_executors.models.changed.sizes import with_kv_heads, with_low_rank, with_shared_layers, with_tied_table
from perfmodel_executors.models.weights import DecoderWeights

# (weights, model before, model after, all changes) -> weights of the model after
WeightChange = Callable[[DecoderWeights, ModelSpec, ModelSpec, ModelChanges], DecoderWeights]


def _kept(weights: DecoderWeights, before: ModelSpec, after: ModelSpec, changes: ModelChanges) -> DecoderWeights:
    """Another use of the same weights."""
    return weights


# Fields of `ModelChanges` whose weights follow from those of the model before, without training.
WEIGHT_CHANGES: MappingProxyType[str, WeightChange] = MappingProxyType(
    {
        "num_kv_heads": with_kv_heads,
        "window": _kept,
        "sparse": _kept,
        "prune": pruned,
        "low_rank": with_low_rank,
        "share_layers": with_shared_layers,
        "tie_embeddings": with_tied_table,
        "early_exit": _kept,
    }
)


def changed_weights(weights: DecoderWeights, changed_from: ChangedFrom) -> DecoderWeights:
    """The weights after all changes, in the order in which the model itself was changed.

    `weights` are those of the original, neither quantised nor shared out over ranks; its matrices may be overwritten.
    Raises PerfmodelError for a change into weights that only training could find.
    """
    model, changes = changed_from.original, changed_from.changes
    for field, change in CHANGES.items():
        if getattr(changes, field) is None:
            continue
        if field not in WEIGHT_CHANGES:
            raise PerfmodelError(
                f"model_changes.{field}: the weights of {model.name} cannot be turned into those without training; "
                f"execute the model's config.json, with random weights."
            )
        after = change(model, changes)
        weights, model = WEIGHT_CHANGES[field](weights, model, after, changes), after
    return replace(weights)
