"""One decoder for every executable `ModelSpec`: layers of a mixer and a feed-forward block over a flat mixed batch.
Linear layers see all tokens of a step at once, mixers see each sequence through its block table, and the LM head only
the rows that are sampled: the structure of the step that the cost model's graph describes."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention, LatentAttention, LinearAttention, MoEFFN
from perfmodel.models.params import weight_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.ops.routing import capacity_rows
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.kernels import Kernels, load_kernels
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.moe import ExpertLayer, RoutingRule
from perfmodel_executors.kernels.weight_formats import AdapterBatch
from perfmodel_executors.models import support
from perfmodel_executors.models.adapters import add_adapters
from perfmodel_executors.models.batch import StepBatch
from perfmodel_executors.models.exits import leave_early
from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.models.loading import load_weights
from perfmodel_executors.models.mixers import MIXERS, MixerStep
from perfmodel_executors.models.mixers.softmax import keys_and_values, ring_of
from perfmodel_executors.models.random_weights import TRAINED, random_weights
from perfmodel_executors.models.rotations import SCALED_BY_LENGTH, Rotations, rotary_table
from perfmodel_executors.models.smoothing import has_static_scales, loads_smoothed
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, MoEWeights
from perfmodel_executors.parallel.group import ALONE, TensorGroup, embed, exchanged
from perfmodel_executors.parallel.sharding import shard_model
from perfmodel_executors.sampling import SamplingSettings, TokenChooser


class Decoder:
    """A model with its weights; keys and values are in the `KVCache` passed to each call. Each rank of `group` has its
    `part` of the model and takes the same steps; of pipeline stages each has its layers, and only the last one logits.
    `weights`, if given, are those of the part. attention: flash, or standard, which keeps the scores in memory."""

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        kernels: Kernels | None = None,
        weights: DecoderWeights | None = None,
        device: torch.device = support.CPU,
        group: TensorGroup = ALONE,
        attention: str = "flash",
        sampling: SamplingSettings | None = None,
        routing: ExpertRouting = TRAINED,
    ) -> None:
        support.check_executable(model, attention)
        if weights is None:
            support.check_memory(f"{model.name}: weights", sum(weight_bytes(model).values()) / group.size, device)
        self.model = model
        self.part = shard_model(model, group)
        self.dtype, self.device, self.group = dtype, device, group
        self.ring = ring_of(model)
        self.is_standard = attention == "standard"
        self.kernels = kernels or load_kernels()
        self.chooser = TokenChooser(self.kernels, device, sampling)
        self.weights = weights or random_weights(model, dtype, seed, device, group, routing)
        self._capacity_factor = routing.capacity_factor
        self.num_adapters, self.adapter_batch = 0, AdapterBatch()
        mixers, longest = [layer.mixer for layer, _ in model.layers], model.max_position_embeddings
        plain = [(m.rope, m.head_dim) for m in mixers if isinstance(m, Attention | LinearAttention)]
        heads = {*plain, *((m.rope, m.qk_rope_head_dim) for m in mixers if isinstance(m, LatentAttention))}
        tables = {(rope, dim): rotary_table(rope, dim, longest, dtype) for rope, dim in heads if rope is not None}
        self._tables = {head: table.to(device) for head, table in tables.items()}

    def new_cache(self, block_size: int, num_blocks: int = 0) -> KVCache:
        """An empty KV cache that fits this model; `num_blocks` are allocated at once, more when they are needed."""
        support.check_blocks(self.model, block_size)
        return KVCache(self.part, self.dtype, block_size, num_blocks, self.device, self.group.num_stripes)

    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Logits of the sampled rows, [S, V], of none before the last stage; writes keys and values of all T tokens."""
        group, update_TC = self.group, None
        if group.stage.num_stages > 1:
            if group.stage.is_first:
                residual_TC = self.embedded(batch)
            else:
                shape = (2, len(batch.tokens_T), self.model.hidden_size)
                state_2TC = torch.empty(shape, dtype=self.dtype, device=self.device)
                group.receive(state_2TC)
                residual_TC, update_TC = state_2TC
            residual_TC, update_TC = self._pass_layers(batch, cache, residual_TC, update_TC)
            assert update_TC is not None, "a stage has a layer"
            if group.stage.is_last:
                return self.logits(residual_TC + update_TC, batch)
            group.pass_on(torch.stack((residual_TC, update_TC)))
            return residual_TC[:0]
        if batch.num_layers_D is None:
            return self.logits(self.through(batch, cache), batch)
        asks = self.model.exits is not None and self.model.exits.asks_lm_head
        ways = (lambda part, *where: self.through(part, cache, *where), partial(self._fill, cache))
        x_TC = leave_early(batch, self.model.num_layers, *ways, self.head if asks else None)
        return self.logits(x_TC, batch)

    def logits(self, x_TC: Tensor, batch: StepBatch) -> Tensor:
        return self.head(x_TC[batch.sample_rows_S])

    def through(
        self, batch: StepBatch, cache: KVCache, first: int = 0, stop: int | None = None, x_TC: Tensor | None = None
    ) -> Tensor:
        """[T, C] behind layer `stop` (all of them), for tokens that come from layer `first`, or from the embedding."""
        residual_TC = self.embedded(batch) if x_TC is None else x_TC
        residual_TC, update_TC = self._pass_layers(batch, cache, residual_TC, None, slice(first, stop))
        return residual_TC if update_TC is None else residual_TC + update_TC

    def _pass_layers(
        self, batch: StepBatch, cache: KVCache, residual_TC: Tensor, update_TC: Tensor | None, span: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream behind this span of layers, and what the last block adds to it."""
        weights, model = self.weights, self.model
        self.adapter_batch.rows = batch.adapter_rows
        assert batch.ring == self.ring, "the batch's slots are not those of this model's cache"
        rotations = Rotations(self._tables, batch.positions_T)
        states = cache.states.rows_of(batch, cache.block_size)
        step = MixerStep(self.kernels, batch, rotations, states, model.norm_eps, self.is_standard, self.group)
        for index, (layer, own) in list(enumerate(zip(self.part.iter_layers(), weights.layers, strict=True)))[span]:
            if layer.mixer is not None and own.mixer is not None:
                x_TC, residual_TC = self._norm(update_TC, residual_TC, own.mixer_norm)
                run = MIXERS[type(layer.mixer)]
                part_TC = run(step, x_TC, layer.mixer, own.mixer, cache.of_layer(index))
                update_TC = self._settled(self.group.all_reduce(part_TC), own.mixer_post_norm)
            if layer.ffn is not None:
                x_TC, residual_TC = self._norm(update_TC, residual_TC, own.ffn_norm)
                if isinstance(own.ffn, FFNWeights):
                    part_TC = self._dense(x_TC, own.ffn, layer.ffn.activation, layer.ffn.gated)
                else:
                    assert isinstance(layer.ffn, MoEFFN)
                    assert own.ffn is not None
                    part_TC = self._moe(x_TC, layer.ffn, own.ffn)
                update_TC = self._settled(self.group.all_reduce(part_TC), own.ffn_post_norm)
        return residual_TC, update_TC

    def next_tokens(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """The tokens that are chosen; of a vector the place of its largest element, which nobody reads."""
        return self.chooser.choose(self.forward(batch, cache), batch.draws_S)

    def step(self, batch: StepBatch, cache: KVCache) -> list[int]:
        """`next_tokens` as a list, once they are known; none on a pipeline stage before the last."""
        if not (len(batch.sample_rows_S) and self.group.stage.is_last):
            self.forward(batch, cache)
            return []
        return list(self.next_tokens(batch, cache).tolist())

    def head(self, x_RC: Tensor) -> Tensor:
        """Logits of the rows, [R, V], or of a model that returns vectors these, [R, C]."""
        model = self.model
        normed_RC = self.kernels.rms_norm(x_RC, self.weights.final_norm, model.norm_eps)
        if model.pooling is not None:
            return torch.nn.functional.normalize(normed_RC.float(), dim=-1)
        logits_RV = self.group.gather(apply_linear(self.kernels, normed_RC, self.weights.lm_head), model.vocab_size)
        if model.logit_scale != 1:
            logits_RV = logits_RV * model.logit_scale
        return logits_RV if model.logit_cap is None else model.logit_cap * torch.tanh(logits_RV / model.logit_cap)

    def embedded(self, batch: StepBatch) -> Tensor:
        x_TC = embed(self.weights.embedding, batch.tokens_T, self.group, self.dtype)
        scale = self.model.embedding_scale
        # Rounded as the table is, which is how Gemma was trained.
        return x_TC if scale == 1 else x_TC * torch.tensor(scale, dtype=x_TC.dtype).item()

    def _fill(self, cache: KVCache, index: int, x_RC: Tensor, positions_R: Tensor, slots_R: Tensor) -> None:
        """Writes the keys and values that layer `index` makes of states that do not pass it."""
        weights, mixer = self.weights.layers[index], list(self.part.iter_layers())[index].mixer
        if not isinstance(mixer, Attention) or not isinstance(weights.mixer, AttentionWeights):
            return
        x_RC, _ = self._norm(None, x_RC, weights.mixer_norm)
        k_RKH, v_RKH = keys_and_values(self.kernels, x_RC, mixer, weights.mixer, self.model.norm_eps)
        if mixer.rope is not None:
            k_RKH = self.kernels.rope(k_RKH, self._tables[mixer.rope, mixer.head_dim][positions_R])
        self.kernels.kv_write(k_RKH, v_RKH, cache.of_layer(index), slots_R)

    def _norm(self, update_TC: Tensor | None, residual_TC: Tensor, weight_C: Tensor | None) -> tuple[Tensor, Tensor]:
        """(what a block reads, the residual stream with what the block before it adds)."""
        if weight_C is None:
            residual_TC = residual_TC if update_TC is None else residual_TC + update_TC
            return residual_TC, residual_TC
        if update_TC is None:
            return self.kernels.rms_norm(residual_TC, weight_C, self.model.norm_eps), residual_TC
        normed: tuple[Tensor, Tensor] = self.kernels.add_rms_norm(update_TC, residual_TC, weight_C, self.model.norm_eps)
        return normed

    def _settled(self, update_TC: Tensor, weight_C: Tensor | None) -> Tensor:
        if weight_C is not None:
            update_TC = self.kernels.rms_norm(update_TC, weight_C, self.model.norm_eps)
        return update_TC if self.model.residual_scale == 1 else update_TC * self.model.residual_scale

    def _dense(self, x_TC: Tensor, weights: FFNWeights, activation: str, gated: bool) -> Tensor:
        kernels = self.kernels
        hidden = kernels.activate(apply_linear(kernels, x_TC, weights.up, weights.up_bias), activation, gated)
        return apply_linear(kernels, hidden, weights.down, weights.down_bias)

    def _moe(self, x_TC: Tensor, ffn: MoEFFN, weights: MoEWeights) -> Tensor:
        kernels = self.kernels
        routing = route_tokens(kernels, kernels.linear(x_TC, weights.router), ffn, weights.router_bias)
        layer = ExpertLayer(weights.up, weights.down, ffn.activation, ffn.gated, weights.up_bias, weights.down_bias)
        update_TC: Tensor
        if weights.local is not None:  # what this rank's experts add, or those of all ranks
            multiply, local = partial(self._held_experts, layer), weights.local
            if self.group.sends_tokens:
                update_TC = exchanged(self.group, local, x_TC, routing, multiply)
            else:
                update_TC = multiply(x_TC, routing[0], local.slots(routing[1]))
        elif self._capacity_factor is None:
            update_TC = kernels.grouped_experts(x_TC, *routing, layer)
        else:
            num_rows = capacity_rows(ffn, len(x_TC), self._capacity_factor)
            update_TC = kernels.capacity_experts(x_TC, *routing, layer, num_rows)
        if weights.shared is not None:
            shared_TC = self._dense(x_TC, weights.shared, ffn.activation, ffn.gated)
            if weights.shared_gate is not None:
                shared_TC = shared_TC * torch.sigmoid(kernels.linear(x_TC, weights.shared_gate))
            update_TC = update_TC + shared_TC
        return update_TC

    def _held_experts(self, layer: ExpertLayer, x_TC: Tensor, weights_TX: Tensor, slots_TX: Tensor) -> Tensor:
        """What the experts of these slots add to each row, -1: none."""
        kept_A, update_TC = torch.nonzero(slots_TX.flatten() >= 0).flatten(), torch.zeros_like(x_TC)
        if not len(kept_A):
            return update_TC
        tokens_A = torch.div(kept_A, slots_TX.shape[1], rounding_mode="floor")
        pairs_A1 = weights_TX.flatten()[kept_A, None], slots_TX.flatten()[kept_A, None]
        return update_TC.index_add_(0, tokens_A, self.kernels.grouped_experts(x_TC[tokens_A], *pairs_A1, layer))

    def assist(self) -> None:
        """Multiplies tokens of other data-parallel ranks in a step that has none of its own."""
        none_0C = torch.zeros(0, self.model.hidden_size, dtype=self.dtype, device=self.device)
        for layer, own in zip(self.part.iter_layers(), self.weights.layers, strict=True):
            if isinstance(layer.ffn, MoEFFN) and isinstance(own.ffn, MoEWeights):
                self._moe(none_0C, layer.ffn, own.ffn)


def route_tokens(kernels: Kernels, logits_TE: Tensor, ffn: MoEFFN, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), [T, top_k], by the model's `Routing`; bias: of the logits, or of the choice alone."""
    own = ffn.routing
    if bias_E is not None and not own.bias_chooses:
        logits_TE, bias_E = logits_TE + bias_E, None
    rule = RoutingRule(own.scoring, own.renormalizes, own.scale, ffn.num_groups, ffn.top_k_groups, own.groups_by)
    chosen: tuple[Tensor, Tensor] = kernels.route(logits_TE, ffn.top_k, rule, bias_E)
    return chosen


def load_decoder(
    model: ModelSpec,
    engine: EngineSpec,
    seed: int = 0,
    device: torch.device = support.CPU,
    kernels: Kernels | None = None,
    group: TensorGroup = ALONE,
    sampling: SamplingSettings | None = None,
    routing: ExpertRouting = TRAINED,
    num_adapters: int = 0,
) -> Decoder:
    """The model in the formats that the engine serves it in, with the weights of its file, else random ones; and random
    adapters, `num_adapters`."""
    served, longest = served_model(model, engine), engine.max_model_len
    is_asked = any(rope.scaling is not None and rope.scaling.kind in SCALED_BY_LENGTH for rope in served.ropes)
    if longest is not None and (is_asked or longest > served.max_position_embeddings):
        served = replace(served, max_position_embeddings=longest)  # which decides how positions are rotated
    support.check_executable(served, engine.attention)
    support.check_capacity(served, routing, group.experts is not None)
    dtype, weights = support.torch_dtype(served), None
    if has_static_scales(served) and device.type != "meta":
        own = engine.model_copy(update={"quantization": None})
        weights = loads_smoothed(served, lambda plain: load_decoder(plain, own, seed, device, None, group), seed)
    elif served.weights_origin is not None and device.type != "meta":
        support.check_memory(f"{served.name}: weights", sum(weight_bytes(served).values()) / group.size, device)
        weights = load_weights(served, dtype, device, group)
    decoder = Decoder(served, dtype, seed, kernels, weights, device, group, engine.attention, sampling, routing)
    if num_adapters:
        decoder.num_adapters = num_adapters
        decoder.adapter_batch = add_adapters(decoder.weights, served, engine, num_adapters, seed)
    return decoder
