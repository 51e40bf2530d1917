"""The changes of a scenario's `model_changes`: for each field a pure function from a model to the changed one.

A change that makes no sense for the model raises SpecError: one sentence with what was found, the limit, the way out.
"""

__all__ = ["CHANGES", "Change"]

from collections.abc import Callable
from types import MappingProxyType

from perfmodel.models.changes.conditional import moefied, with_early_exit, with_experts
from perfmodel.models.changes.mixers import (
    with_kv_heads,
    with_latent,
    with_linear_attention,
    with_sparse_attention,
    with_ssm_layers,
    with_window,
)
from perfmodel.models.changes.weights import pruned, with_low_rank, with_shared_layers, with_tied_embeddings
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ModelSpec

Change = Callable[[ModelSpec, ModelChanges], ModelSpec]

# Field of `ModelChanges` -> what it does, in the order in which they are applied: attention, then sizes, then use.
CHANGES: MappingProxyType[str, Change] = MappingProxyType(
    {
        "num_kv_heads": with_kv_heads,
        "latent": with_latent,
        "window": with_window,
        "sparse": with_sparse_attention,
        "linear": with_linear_attention,
        "ssm_layers": with_ssm_layers,
        "prune": pruned,
        "low_rank": with_low_rank,
        "moefy": moefied,
        "experts": with_experts,
        "share_layers": with_shared_layers,
        "tie_embeddings": with_tied_embeddings,
        "early_exit": with_early_exit,
    }
)
