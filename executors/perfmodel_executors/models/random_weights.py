"""Weights of a decoder, random by seed: each matrix normal with variance 1 / fan-in, drawn in fp32 on the device that
will hold it, then rounded or quantised; every rank draws the whole model and keeps its part. Biases of random routers
make experts as popular as the simulator draws them (vLLM's routing simulator replaces the choice)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import DenseFFN, Layer, MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.kernels.weight_formats import LowRankWeight, Weight
from perfmodel_executors.models.parts import MIXER_PARTS, Parts, WeightPart, dense_parts, expert_parts, shared_parts
from perfmodel_executors.models.support import CPU
from perfmodel_executors.models.weights import DecoderWeights, FFNWeights, LayerWeights, MoEWeights
from perfmodel_executors.parallel.experts import layer_chances
from perfmodel_executors.parallel.group import ALONE, TensorGroup
from perfmodel_executors.parallel.sharding import held_weights

# Of the norms of a few columns, in all layers the same ones, where outliers are multiplied apart: activations of 20
# beside others of 1, as trained models of some billion parameters have them (Dettmers et al. 2022, section 4).
_OUTLIER = 20.0
TRAINED = ExpertRouting()  # as the weights have it
_SAMPLES = 4096  # tokens, of which chances are counted
_ROUNDS = 60
_MIN_CHANCE = 0.5 / _SAMPLES
_BIAS_KINDS = ("bias", "sinks", "e_score_correction_bias", "gate_up_proj_bias", "down_proj_bias")


class RandomTensors:
    def __init__(self, dtype: torch.dtype, seed: int, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        # Tensors without memory are not drawn.
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return values.div_(math.sqrt(shape[-1])).to(self.dtype)

    def features(self, num_heads: int, num_rows: int, size: int) -> Tensor:
        """Rows like standard normal ones, of which each `size` are orthogonal (Choromanski et al. 2020, 3.2)."""
        blocks = -(-num_rows // size)
        normal = torch.randn(num_heads, blocks, size, size, generator=self.generator, device=self.device)
        if self.device.type == "meta":
            return normal.flatten(1, 2)[:, :num_rows].to(self.dtype)
        directions = torch.linalg.qr(normal).Q.mT.flatten(1, 2)[:, :num_rows]
        lengths = torch.randn(num_heads, num_rows, size, generator=self.generator, device=self.device).norm(dim=-1)
        rows: Tensor = (directions * lengths[..., None]).to(self.dtype)
        return rows

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def part(self, part: WeightPart) -> Weight | None:
        if not part.is_there:
            return None
        if part.kind in _BIAS_KINDS:
            values = torch.randn(*part.shape, generator=self.generator, device=self.device)
            return values.mul_(0.02).to(self.dtype)
        if part.kind == "features":
            return self.features(*part.shape)
        if len(part.shape) == 1:
            return self.ones(*part.shape)
        if part.rank is None:
            return self.matrix(*part.shape)
        num_out, num_in = part.shape
        return LowRankWeight(self.matrix(part.rank, num_in), self.matrix(num_out, part.rank))

    def all(self, parts: Parts) -> dict[str, Any]:
        return {name: self.part(part) for name, part in parts.items()}


def random_weights(
    model: ModelSpec,
    dtype: torch.dtype,
    seed: int,
    device: torch.device = CPU,
    group: TensorGroup = ALONE,
    routing: ExpertRouting = TRAINED,
) -> DecoderWeights:
    """Weights of the model, or this rank's part; equal for equal (model, dtype, seed, kind of device, routing)."""
    draw = RandomTensors(dtype, seed, device)
    embedding = head = draw.matrix(model.vocab_size, model.hidden_size)
    if not model.tie_word_embeddings:
        head = draw.matrix(model.vocab_size, model.hidden_size)
    specs = enumerate(model.iter_layers())
    layers = (_with_popularity(_layer(draw, model, layer), layer, index, routing) for index, layer in specs)
    return held_weights(DecoderWeights(embedding, head, draw.ones(model.hidden_size)), layers, model, group)


def random_layers(model: ModelSpec, dtype: torch.dtype, seed: int, device: torch.device = CPU) -> list[LayerWeights]:
    """Weights of the layers of a small `model` alone, in its dtype."""
    draw = RandomTensors(dtype, seed, device)
    return [_layer(draw, model, layer) for layer in model.iter_layers()]


def _layer(draw: RandomTensors, model: ModelSpec, layer: Layer) -> LayerWeights:
    hidden = model.hidden_size

    def norm(wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        weights_C = draw.ones(hidden)
        if model.quantization.outlier_share:
            weights_C[: math.ceil(model.quantization.outlier_share * hidden)] = _OUTLIER
        return weights_C

    pre, post = model.pre_norms, model.post_norms
    weights = LayerWeights(norm(pre), norm(pre), mixer_post_norm=norm(post), ffn_post_norm=norm(post))
    if layer.mixer is not None:
        make, parts_of = MIXER_PARTS[type(layer.mixer)]
        weights.mixer = make(**draw.all(parts_of(layer.mixer, hidden)))
    if isinstance(layer.ffn, DenseFFN):
        weights.ffn = FFNWeights(**draw.all(dense_parts(layer.ffn, hidden)))
    elif isinstance(layer.ffn, MoEFFN):
        has_shared = bool(layer.ffn.shared_intermediate_size)
        shared = FFNWeights(**draw.all(shared_parts(layer.ffn, hidden))) if has_shared else None
        weights.ffn = MoEWeights(shared=shared, **draw.all(expert_parts(layer.ffn, hidden)))
    return weights


def _with_popularity(weights: LayerWeights, layer: Layer, index: int, routing: ExpertRouting) -> LayerWeights:
    """`weights` with a router that chooses as `routing` says, if it does. Raises PerfmodelError for experts
    chosen in groups."""
    ffn, own = layer.ffn, weights.ffn
    is_named = routing.alpha is not None or routing.popularity is not None
    if not (is_named and isinstance(own, MoEWeights) and isinstance(ffn, MoEFFN)):
        return weights
    if ffn.num_groups > 1:
        raise PerfmodelError(
            "experts that are chosen group by group are not executed with a popularity; leave out routing.alpha or "
            "routing.popularity."
        )
    bias = popular_biases(layer_chances(routing, ffn, index), ffn, index)
    return replace(weights, ffn=replace(own, router_bias=bias.to(own.router)))


def popular_biases(chances_E: Sequence[float] | np.ndarray, ffn: MoEFFN, seed: int = 0) -> Tensor:
    """[E] biases with which `ffn` chooses experts with these chances, where logits are standard normal, as random
    routers' are. Each round raises the biases of experts chosen too seldom, by the log of what is missing."""
    wanted = torch.as_tensor(np.asarray(chances_E), dtype=torch.float64).clamp_min(_MIN_CHANCE)
    drawn = torch.randn(_SAMPLES, len(wanted), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = torch.sigmoid(drawn) if ffn.routing.bias_chooses else drawn
    biases, step = torch.log(wanted), 0.5
    for _ in range(_ROUNDS):
        chosen = torch.topk(scores + biases, ffn.top_k, dim=-1).indices
        result = torch.bincount(chosen.flatten(), minlength=len(wanted)).double() / _SAMPLES
        biases = biases + step * torch.log(wanted / result.clamp_min(_MIN_CHANCE))
        step *= 0.97
    return biases - biases.mean()
