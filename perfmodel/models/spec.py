"""`ModelSpec`: one model as everything else sees it, structure and number formats, no time and no hardware."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from perfmodel.models import architecture as arch
from perfmodel.models.architecture import Attention, Layer, LinearAttention, QuantizationSpec
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.vision import VisionEncoder

# How tokens are drawn, cheapest first. random: from the whole distribution (a temperature alone); top_k, top_p: from a
# part of it, which sorts it.
SamplingMethod = Literal["greedy", "random", "top_k", "top_p"]
Pooling = Literal["last", "cls", "mean"]  # which hidden states of a prompt make its vector: the last, the first, all


@dataclass(frozen=True, slots=True)
class WeightSparsity:
    """Linear layers (not embedding, LM head, router) that store `density` of their weights, with an index each.

    is_2_4: two of every four, which sparse tensor cores multiply at `sparsity_speedup` times the dense rate"""

    density: float
    index_bits: float
    is_2_4: bool = False


@dataclass(frozen=True, slots=True)
class ExitSpec:
    """Tokens that are decoded may leave early: `reach[i]` of them come to layer i.

    asks_lm_head: each layer's output goes through the LM head to see whether its token may leave"""

    reach: tuple[float, ...]
    asks_lm_head: bool = False


@dataclass(frozen=True, slots=True)
class ChangedFrom:
    """The model that a changed one was made of, whose weights are in a file, and what was changed."""

    original: "ModelSpec"
    changes: ModelChanges


COMPONENTS = (
    *("embedding", "lm_head", "attention", "linear_attention", "dense_ffn", "experts", "shared_experts"),
    *("router", "norms"),
)


_NOT_QUANTIZED = QuantizationSpec()


def layer_runs(layers: Iterable[Layer]) -> tuple[tuple[Layer, int], ...]:
    """Equal consecutive layers together: ((layer, how many), ...)."""
    return tuple((layer, sum(1 for _ in run)) for layer, run in groupby(layers))


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model. Sizes in elements, before sharding.

    name:         as people say it ("llama-3.1-8b")
    layers:       runs of equal consecutive layers, in order: ((layer, how many), ...)
    dtype:        format of weights and activations that are not quantized
    sampling:     the card's generation_config: "greedy", "top_p", ... (what a server applies by default)
    extra_params: parameters outside the text decoder that are loaded with it (a vision tower), if known
    other_inputs: inputs other than text that its configuration has encoders for: images, audio
    norm_bias:    norms are LayerNorms with a bias (GPT-2, OPT, Falcon) instead of RMSNorms
    pre_norms, post_norms: a norm before each block, and one on what it adds: both (Gemma 2 and 3, GLM-4), or the
                  second alone (OLMo 2)
    norm_offset:  what is added to the weights of norms as files have them: 1 for Gemma's and Qwen3-Next's
    embedding_scale, residual_scale, logit_scale: multipliers of the embedding (Gemma, Granite), of what each block adds
                  to the residual stream, and of the logits (Granite)
    logit_cap:    logits become cap * tanh(logit / cap) (Gemma 2)
    parallel_blocks:   mixer and feed-forward read the same input: one all-reduce a layer (GPT-NeoX, Falcon, Phi)
    shared_block_norm: ... behind one norm (Falcon-7B, Phi)
    num_learned_positions: rows of a learned position table (GPT-2, OPT); 0 with rotary or no positions
    norm_eps:     added to the mean square in norms; where a file leaves it open, that of transformers' LlamaConfig
    has_position_axes: positions of images and videos have several axes (M-RoPE)
    has_format_by_name: nothing but the checkpoint's name says which number format its weights are in
    weights_path: the file with the weights themselves, where the model was read from one (.gguf, .safetensors)
    num_distinct_layers: layers with weights of their own, used in turn (ALBERT: 1); None: each has its own
    weight_sparsity, exits: of changed models, see there
    dtype_rate:   the peak rate that multiplies operands in `dtype` in linear layers, where it is not the format's own:
                  tf32 for fp32, fp16_acc16 for fp16
    converts_fp8: cached FP8 becomes 16-bit numbers without an instruction, which no calibrated kernel has in it
    num_streams:  hidden states that are passed on side by side, mixed before and behind each block (DeepSeek-V4's
                  hyper-connections)
    residual_block: layers whose sums all later blocks weigh (Kimi-K3's attention residuals); None: plain residuals
    num_prediction_layers: layers of a head that predicts further tokens (MTP); they draft, and are in no other figure
    not_computed: fields of its file that change what it computes and that our decoder does not honour, as name=value
    changed_from: of a changed model whose original has a file with weights: a run makes its weights of those
    vision:       its encoder of images, if its family's is known
    pooling:      how a model that returns a vector, or scores, instead of text makes it of the prompt's hidden states
    num_labels:   scores that it returns; 0: a vector"""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[tuple[Layer, int], ...]
    tie_word_embeddings: bool = False
    dtype: str = "bf16"
    quantization: QuantizationSpec = _NOT_QUANTIZED
    sampling: SamplingMethod = "greedy"
    hf_id: str | None = None
    aliases: tuple[str, ...] = ()
    published_params: float | None = None
    extra_params: float = 0.0
    other_inputs: tuple[str, ...] = ()
    source: str = ""
    norm_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    parallel_blocks: bool = False
    shared_block_norm: bool = False
    num_learned_positions: int = 0
    lm_head_bias: bool = False
    norm_eps: float = 1e-6
    has_position_axes: bool = False
    has_format_by_name: bool = False
    weights_path: str | None = None
    num_distinct_layers: int | None = None
    weight_sparsity: WeightSparsity | None = None
    exits: ExitSpec | None = None
    dtype_rate: str | None = None
    converts_fp8: bool = False
    num_prediction_layers: int = 0
    not_computed: tuple[str, ...] = ()
    changed_from: ChangedFrom | None = None
    vision: VisionEncoder | None = None
    pooling: Pooling | None = None
    num_labels: int = 0
    num_streams: int = 1
    residual_block: int | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see what comes after them, so that prompts are computed whole and nothing is cached."""
        return any(isinstance(layer.mixer, Attention) and not layer.mixer.is_causal for layer, _ in self.layers)

    @property
    def encoder_notes(self) -> tuple[str, ...]:
        """A sentence on what is modelled of a model with encoders besides its text decoder, or that gives no text; none
        for others."""
        if self.pooling is not None:
            what = f"{self.num_labels} score{'s' * (self.num_labels > 1)}" if self.num_labels else "a vector"
            return (
                f"{self.name} returns {what} of each prompt, which counts as one token; lengths of answers do not.",
            )
        if not self.extra_params and not self.other_inputs:
            return ()
        inputs = " and ".join(self.other_inputs) or "images"
        encoder_part = "the weights of its encoder are not counted in memory"
        if self.extra_params:
            encoder_part = (
                f"{self.extra_params / 1e9:.2g} billion parameters beside it (an encoder, as a rule) lie in memory"
            )
        what = f"as its text decoder: {inputs} are not modelled"
        if self.vision is not None:
            what = "as its text decoder, with its encoder for images in traffic.images"
        return (f"{self.name} is modelled {what}; {encoder_part}.",)

    @property
    def weights_origin(self) -> str | None:
        """The file that a run's weights are made of: `weights_path`, or that of the model before it was changed."""
        return (self.changed_from.original if self.changed_from else self).weights_path

    @property
    def ropes(self) -> tuple[arch.Rope, ...]:
        """The distinct rotary positions of its layers, in order."""
        mixers = (layer.mixer for layer, _ in self.layers)
        kinds = (*arch.KEYED, LinearAttention)
        return tuple(dict.fromkeys(m.rope for m in mixers if isinstance(m, kinds) and m.rope is not None))

    @property
    def rope_scaling(self) -> str | None:
        """How frequencies are stretched for contexts beyond the trained one, in any layer; None where they are not."""
        return next((rope.scaling.kind for rope in self.ropes if rope.scaling is not None), None)

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    def iter_layers(self) -> Iterator[Layer]:
        """Each layer in order."""
        for layer, count in self.layers:
            for _ in range(count):
                yield layer

    @cached_property
    def attention_spans(self) -> tuple[int, ...]:
        """The distinct limits on what a query sees (windows, chunks, blocks), ascending; full attention adds none."""
        mixers = (layer.mixer for layer, _ in self.layers)
        spans = {mixer.span for mixer in mixers if isinstance(mixer, Attention) and mixer.span is not None}
        return tuple(sorted(spans))

    @cached_property
    def rolling_span(self) -> int | None:
        """The tokens whose KV a sequence holds at most, where every layer with a cache overwrites what it left behind.

        None where some layer keeps all, so that blocks are handed out for whole sequences."""
        cached = [layer.mixer for layer, _ in self.layers if isinstance(layer.mixer, arch.KEYED)]
        spans = [mixer.span for mixer in cached if isinstance(mixer, Attention) and mixer.is_rolling]
        longest = max((span for span in spans if span is not None), default=None)
        return longest if len(spans) == len(cached) else None

    @cached_property
    def has_states(self) -> bool:
        """Whether some layer keeps for each sequence what another has no use for: a state, a ring, tokens by score."""
        recurrent = arch.Mamba | arch.GatedDeltaNet | LinearAttention
        return self.keeps_beside_blocks or any(isinstance(layer.mixer, recurrent) for layer, _ in self.layers)

    @cached_property
    def keeps_beside_blocks(self) -> bool:
        """Whether attention keeps tokens by age or by score, in rows of sequences."""
        mixers = (layer.mixer for layer, _ in self.layers)
        return bool(self.quantization.kv_recent) or any(isinstance(m, Attention) and m.evicts_to for m in mixers)
