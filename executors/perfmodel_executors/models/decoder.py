"""One decoder for every executable `ModelSpec`: pre-norm layers of attention and feed-forward over a flat mixed batch.

Linear layers see all tokens of a step at once, attention sees each sequence through its block table, and the LM head
only the rows that are sampled: the structure of the step that the cost model's graph describes.
"""

__all__ = ["Decoder", "load_decoder"]

from functools import partial

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention, DenseFFN, MoEFFN
from perfmodel.models.params import weight_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel_executors.kernels import Kernels, load_kernels
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.kernels.rope.reference import rope_table
from perfmodel_executors.models.attention import attend, keys_and_values, ring_of
from perfmodel_executors.models.batch import StepBatch
from perfmodel_executors.models.choosing import TokenChooser
from perfmodel_executors.models.exits import leave_early
from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.models.loading import load_weights
from perfmodel_executors.models.random_weights import random_weights
from perfmodel_executors.models.rotations import Rotations
from perfmodel_executors.models.support import (
    CPU,
    check_blocks,
    check_executable,
    check_memory,
    kv_dtype,
    kv_packing,
    torch_dtype,
    with_plain_weights,
)
from perfmodel_executors.models.weights import (
    AttentionWeights,
    DecoderWeights,
    FFNWeights,
    LayerWeights,
    MoEWeights,
)
from perfmodel_executors.parallel.group import ALONE, TensorGroup, embed
from perfmodel_executors.parallel.sharding import shard_model
from perfmodel_executors.sampling import SamplingSettings


class Decoder:
    """A model with its weights; keys and values are in the `KVCache` passed to each call.

    Under tensor parallelism each rank of `group` has a decoder with its `part` of the model (heads, widths, rows of the
    vocabulary), and all take the same steps; `weights`, if given, are those of the part. `attention`: flash, or
    standard, which keeps the scores in memory. `sampling`: how tokens with a random number are drawn.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        kernels: Kernels | None = None,
        weights: DecoderWeights | None = None,
        device: torch.device = CPU,
        group: TensorGroup = ALONE,
        attention: str = "flash",
        sampling: SamplingSettings | None = None,
    ) -> None:
        check_executable(model, attention)
        if weights is None:
            check_memory(f"{model.name}: weights", sum(weight_bytes(model).values()) / group.size, device)
        self.model = model
        self.part = shard_model(model, group.size)
        self.dtype = dtype
        self.device = device
        self.group = group
        self.ring = ring_of(model)
        self.is_standard = attention == "standard"
        self.kernels = kernels or load_kernels()
        self.chooser = TokenChooser(self.kernels, device, sampling)
        self.weights = weights or random_weights(model, dtype, seed, device, group)
        dims = {layer.mixer.head_dim for layer in model.iter_layers() if isinstance(layer.mixer, Attention)}
        positions, theta = model.max_position_embeddings, model.rope_theta
        self._rope = {dim: rope_table(positions, dim, theta, dtype).to(device) for dim in dims}

    def new_cache(self, block_size: int, num_blocks: int = 0) -> KVCache:
        """An empty KV cache that fits this model; `num_blocks` are allocated at once, more when they are needed."""
        check_blocks(self.model, block_size)
        form, packing = kv_dtype(self.model, self.dtype), kv_packing(self.model)
        return KVCache(self.part, block_size, form, num_blocks, self.device, packing)

    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Logits of the sampled rows, [S, V]; writes the keys and values of all T tokens into `cache`."""
        if batch.num_layers_D is None:
            return self.logits(self.through(batch, cache), batch)

        def run_layers(part: StepBatch, first: int, stop: int, x_TC: Tensor | None) -> Tensor:
            return self.through(part, cache, first, stop, x_TC)

        asks = self.model.exits is not None and self.model.exits.asks_lm_head
        fill = partial(self._fill, cache)
        x_TC = leave_early(batch, self.model.num_layers, run_layers, fill, self._ask if asks else None)
        return self.logits(x_TC, batch)

    def logits(self, x_TC: Tensor, batch: StepBatch) -> Tensor:
        """Logits of the sampled rows, [S, V], from what the last layer gives for all."""
        weights = self.weights
        x_SC = self.kernels.rms_norm(x_TC[batch.sample_rows_S], weights.final_norm, self.model.norm_eps)
        return self.group.gather(self.kernels.linear(x_SC, weights.lm_head), self.model.vocab_size)

    def through(
        self, batch: StepBatch, cache: KVCache, first: int = 0, stop: int | None = None, x_TC: Tensor | None = None
    ) -> Tensor:
        """[T, C] behind layer `stop` (all of them), for tokens that come from layer `first`, or from the embedding."""
        weights = self.weights
        assert batch.ring == self.ring, "the batch's slots are not those of this model's cache"
        rotations = Rotations(self._rope, batch.positions_T)
        residual_TC = embed(weights.embedding, batch.tokens_T, self.group) if x_TC is None else x_TC
        update_TC: Tensor | None = None  # what the last block adds to the residual stream
        layers = list(zip(self.part.iter_layers(), weights.layers, strict=True))
        num_below = sum(isinstance(layer.mixer, Attention) for layer, _ in layers[:first])
        pages = iter(cache.pages[num_below:])
        for layer, layer_weights in layers[first:stop]:
            if isinstance(layer.mixer, Attention) and layer_weights.mixer is not None:
                x_TC, residual_TC = self._norm(update_TC, residual_TC, layer_weights.mixer_norm)
                update_TC = self._attention(x_TC, layer.mixer, layer_weights.mixer, next(pages), batch, rotations)
            if layer.ffn is not None:
                x_TC, residual_TC = self._norm(update_TC, residual_TC, layer_weights.ffn_norm)
                update_TC = self._feed_forward(x_TC, layer.ffn, layer_weights)
        return residual_TC if update_TC is None else residual_TC + update_TC

    def next_tokens(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """[S]: the next token of each sampled sequence."""
        return self.chooser.choose(self.forward(batch, cache), batch.draws_S)

    def step(self, batch: StepBatch, cache: KVCache) -> list[int]:
        """`next_tokens` as a list, once they are known."""
        if not len(batch.sample_rows_S):
            self.forward(batch, cache)
            return []
        tokens: list[int] = self.next_tokens(batch, cache).tolist()
        return tokens

    def _ask(self, x_RC: Tensor) -> Tensor:
        """What the LM head makes of states between two layers."""
        normed_RC = self.kernels.rms_norm(x_RC, self.weights.final_norm, self.model.norm_eps)
        return self.group.gather(self.kernels.linear(normed_RC, self.weights.lm_head), self.model.vocab_size)

    def _fill(self, cache: KVCache, index: int, x_RC: Tensor, positions_R: Tensor, slots_R: Tensor) -> None:
        """Writes the keys and values that layer `index` makes of states that do not pass it."""
        layers, weights = list(self.part.iter_layers()), self.weights.layers[index]
        mixer = layers[index].mixer
        if not isinstance(mixer, Attention) or weights.mixer is None:
            return
        pages = cache.pages[sum(isinstance(layer.mixer, Attention) for layer in layers[:index])]
        x_RC, _ = self._norm(None, x_RC, weights.mixer_norm)
        k_RKH, v_RKH = keys_and_values(self.kernels, x_RC, mixer, weights.mixer, self.model.norm_eps)
        if mixer.use_rope:
            k_RKH = self.kernels.rope(k_RKH, self._rope[mixer.head_dim][positions_R])
        self.kernels.kv_write(k_RKH, v_RKH, pages, slots_R)

    def _norm(self, update_TC: Tensor | None, residual_TC: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
        if update_TC is None:
            return self.kernels.rms_norm(residual_TC, weight_C, self.model.norm_eps), residual_TC
        normed: tuple[Tensor, Tensor] = self.kernels.add_rms_norm(update_TC, residual_TC, weight_C, self.model.norm_eps)
        return normed

    def _attention(
        self,
        x_TC: Tensor,
        mixer: Attention,
        weights: AttentionWeights,
        pages: KVPages,
        batch: StepBatch,
        rotations: Rotations,
    ) -> Tensor:
        kernels, num_tokens = self.kernels, x_TC.shape[0]
        heads, kv_heads, dim, v_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.v_head_dim
        gate = heads * v_dim if mixer.output_gate else 0
        sizes = [heads * dim, kv_heads * dim, kv_heads * v_dim, gate]
        q, k, v, gate_TD = torch.split(apply_linear(kernels, x_TC, weights.qkv, weights.qkv_bias), sizes, dim=-1)
        q_TNH, k_TKH = q.view(num_tokens, heads, dim), k.view(num_tokens, kv_heads, dim)
        if weights.q_norm is not None:
            q_TNH = kernels.rms_norm(q_TNH, weights.q_norm, self.model.norm_eps)
            k_TKH = kernels.rms_norm(k_TKH, weights.k_norm, self.model.norm_eps)
        v_TKH = v.view(num_tokens, kv_heads, v_dim)
        out_TNH = attend(kernels, mixer, q_TNH, k_TKH, v_TKH, pages, batch, rotations, self.is_standard)
        out_TD = out_TNH.flatten(1)
        if gate:
            out_TD = out_TD * torch.sigmoid(gate_TD)
        return self.group.all_reduce(apply_linear(kernels, out_TD, weights.out, weights.out_bias))

    def _feed_forward(self, x_TC: Tensor, ffn: DenseFFN | MoEFFN, weights: LayerWeights) -> Tensor:
        if isinstance(weights.ffn, FFNWeights):
            return self.group.all_reduce(self._dense(x_TC, weights.ffn, ffn.activation, ffn.gated))
        assert isinstance(ffn, MoEFFN)
        assert isinstance(weights.ffn, MoEWeights)
        return self.group.all_reduce(self._moe(x_TC, ffn, weights.ffn))

    def _dense(self, x_TC: Tensor, weights: FFNWeights, activation: str, gated: bool) -> Tensor:
        kernels = self.kernels
        hidden = kernels.activate(apply_linear(kernels, x_TC, weights.up, weights.up_bias), activation, gated)
        return apply_linear(kernels, hidden, weights.down, weights.down_bias)

    def _moe(self, x_TC: Tensor, ffn: MoEFFN, weights: MoEWeights) -> Tensor:
        kernels = self.kernels
        routing = kernels.route(kernels.linear(x_TC, weights.router), ffn.top_k)
        update_TC: Tensor = kernels.grouped_experts(x_TC, *routing, weights.up, weights.down, ffn.activation, ffn.gated)
        if weights.shared is not None:
            shared_TC = self._dense(x_TC, weights.shared, ffn.activation, ffn.gated)
            if weights.shared_gate is not None:
                shared_TC = shared_TC * torch.sigmoid(kernels.linear(x_TC, weights.shared_gate))
            update_TC = update_TC + shared_TC
        return update_TC


def load_decoder(
    model: ModelSpec,
    engine: EngineSpec,
    seed: int = 0,
    device: torch.device = CPU,
    kernels: Kernels | None = None,
    group: TensorGroup = ALONE,
    sampling: SamplingSettings | None = None,
) -> Decoder:
    """The model in the formats that the engine serves it in, with the weights of its file, else random ones."""
    served = served_model(with_plain_weights(model), engine)
    check_executable(served, engine.attention)
    dtype, weights = torch_dtype(served), None
    if served.weights_origin is not None and device.type != "meta":
        check_memory(f"{served.name}: weights", sum(weight_bytes(served).values()) / group.size, device)
        weights = load_weights(served, dtype, device, group)
    return Decoder(served, dtype, seed, kernels, weights, device, group, engine.attention, sampling)
