"""Experts as popular as a scenario says, of models with random weights: biases of their routers, with which tokens
choose an expert as often as the simulator draws it. The routers of real weights stay as they were trained. Source:
vLLM's routing simulator (`VLLM_MOE_ROUTING_SIMULATION_STRATEGY`), which replaces the choice instead."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Layer, MoEFFN
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.models.weights import LayerWeights, MoEWeights
from perfmodel_executors.parallel.experts import layer_chances

TRAINED = ExpertRouting()  # as the weights have it
_SAMPLES = 4096  # tokens, of which chances are counted
_ROUNDS = 60
_LEAST_CHANCE = 0.5 / _SAMPLES


def with_popularity(
    weights: Sequence[LayerWeights], layers: Sequence[Layer], routing: ExpertRouting
) -> list[LayerWeights]:
    """The layers' weights with routers that choose as `routing` says; where it names no popularity, as they are. Raises
    PerfmodelError for experts that are chosen group by group."""
    if routing.alpha is None and routing.popularity is None:
        return list(weights)
    found = []
    for index, (own, layer) in enumerate(zip(weights, layers, strict=True)):
        if isinstance(own.ffn, MoEWeights) and isinstance(layer.ffn, MoEFFN):
            if layer.ffn.num_groups > 1:
                raise PerfmodelError(
                    "experts that are chosen group by group are not executed with a popularity; leave out "
                    "routing.alpha or routing.popularity."
                )
            bias = popular_biases(layer_chances(routing, layer.ffn, index), layer.ffn, index)
            own = replace(own, ffn=replace(own.ffn, router_bias=bias.to(own.ffn.router)))
        found.append(own)
    return found


def popular_biases(chances_E: Sequence[float] | np.ndarray, ffn: MoEFFN, seed: int = 0) -> Tensor:
    """[E] biases with which `ffn` chooses experts with these chances, where logits are standard normal, as random
    routers' are. Each round raises the biases of experts chosen too seldom, by the log of what is missing."""
    wanted = torch.as_tensor(np.asarray(chances_E), dtype=torch.float64).clamp_min(_LEAST_CHANCE)
    drawn = torch.randn(_SAMPLES, len(wanted), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = torch.sigmoid(drawn) if ffn.routing.bias_chooses else drawn
    biases, step = torch.log(wanted), 0.5
    for _ in range(_ROUNDS):
        chosen = torch.topk(scores + biases, ffn.top_k, dim=-1).indices
        found = torch.bincount(chosen.flatten(), minlength=len(wanted)).double() / _SAMPLES
        biases = biases + step * torch.log(wanted / found.clamp_min(_LEAST_CHANCE))
        step *= 0.97
    return biases - biases.mean()
