"""`BatchShape`, the shape of a step, and `Work`, what one operator does on one device.

A `BatchShape` is the sufficient statistic of a scheduled step: request identity never affects cost. A `Work` counts
FLOPs, bytes per memory level and messages; `perfmodel.cost` times it."""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, TypeVar

from perfmodel.errors import SpecError
from perfmodel.models.vision import ImageGrid
from perfmodel.ops.messages import Message
from perfmodel.ops.problem_sizes import ProblemSize

E = TypeVar("E")


class Depends(Enum):
    """The part of a BatchShape that determines an operator's work (the memo key of the cost model)."""

    TOKENS = "tokens"  # num_tokens
    ROWS = "rows"  # num_tokens, num_decodes
    GROUP = "group"  # group_tokens
    SAMPLES = "samples"  # num_samples
    PREFILL = "prefill"  # prefills
    IMAGES = "images"  # images
    DECODE = "decode"  # num_decodes, decode_tokens, decode_context, decode_windowed
    ADAPTERS = "adapters"  # num_adapters, adapter_tokens, num_tokens, num_samples
    MIXED = "mixed"  # prefills and what DECODE looks at; no work unless the step has both


class BatchShape(NamedTuple):
    """What a step computes, whole model, before any sharding.

    num_tokens:      query tokens of all grants
    num_samples:     sequences whose logits are needed (one row of the LM head each)
    prefills:        (query tokens, cached tokens) of each grant of more than one token
    num_decodes:     decoding sequences, each with one token, or drafted ones to verify beside it
    decode_context:  sum of their KV lengths, the new token included
    decode_windowed: for each attention span of the model (`ModelSpec.attention_spans`), the sum over decodes of
                     min(KV length, span), in that order; empty without limited spans
    group_tokens:    query tokens of all data-parallel ranks that share experts; 0: every rank has `num_tokens`
    decode_tokens:   query tokens of all decodes, verified ones included; 0: one each
    drafting:        decodes that draft at least 1, 2 ... deep (pipelined: for the next round)
    num_draft_tokens: drafted tokens to verify, counted in `group_tokens` only; `verified` adds them
    num_adapters:    LoRA adapters that the step's requests name; -1: as many as on average (`AdapterMix`)
    adapter_tokens:  query tokens of these requests
    images:          that the encoder computes in this step
    num_masks:       of the vocabulary, for answers of a required shape; -1: as many as on average
    first_half:      of num_tokens, where the step is cut in two; 0: if they suffice, half of them; -1: it is not cut"""

    num_tokens: int
    num_samples: int
    prefills: tuple[tuple[int, int], ...] = ()
    num_decodes: int = 0
    decode_context: int = 0
    decode_windowed: tuple[int, ...] = ()
    group_tokens: int = 0
    decode_tokens: int = 0
    drafting: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_adapters: int = -1
    adapter_tokens: int = 0
    images: tuple[ImageGrid, ...] = ()
    num_masks: int = -1
    first_half: int = 0

    @property
    def num_queries(self) -> int:
        return self.decode_tokens or self.num_decodes

    @property
    def queries_per_decode(self) -> float:
        return self.decode_tokens / self.num_decodes if self.decode_tokens else 1.0

    @property
    def apart(self) -> tuple["BatchShape", "BatchShape"]:
        """The step split into prompts and decodes."""
        decoded = self.num_decodes
        tokens, samples = self.num_tokens - decoded, self.num_samples - decoded
        everyone = self.group_tokens
        of_prompts = everyone - decoded - self.num_draft_tokens if everyone else 0
        decodes = BatchShape(
            decoded,
            decoded,
            (),
            decoded,
            self.decode_context,
            self.decode_windowed,
            everyone - tokens if everyone else 0,
            self.decode_tokens,
            self.drafting,
            self.num_draft_tokens,
        )
        return BatchShape(tokens, samples, self.prefills, 0, 0, (), of_prompts, images=self.images), decodes

    def verified(self, spans: tuple[int, ...]) -> "BatchShape":
        """The step that verifies `num_draft_tokens`: more tokens, samples and KV; it drafts nothing."""
        drafted = self.num_draft_tokens
        return BatchShape(
            self.num_tokens + drafted,
            self.num_samples + drafted,
            self.prefills,
            self.num_decodes,
            self.decode_context + drafted,
            tuple(
                [
                    _within(seen + drafted, self.num_decodes, span)
                    for seen, span in zip(self.decode_windowed, spans, strict=True)
                ]
            ),
            self.group_tokens,
            self.num_decodes + drafted if drafted else 0,
            num_masks=self.num_masks,
        )


class AdapterMix(NamedTuple):
    """LoRA adapters of a device and of the traffic.

    num_slots: adapters that a step may have; rank: of a slot; modules: that have them, None: all
    chances:   how likely a request names each adapter; is_grouped: one kernel for all adapters of a step"""

    num_slots: int
    rank: int
    modules: tuple[str, ...] | None
    chances: tuple[float, ...]
    is_grouped: bool

    def of(self, shape: BatchShape) -> tuple[float, float]:
        """(adapters, their tokens) of a step; where the shape leaves them open, of n sequences in expectation

        D = min(slots, sum over adapters of 1 - (1 - p)^n)"""
        if shape.num_adapters >= 0:
            return shape.num_adapters, shape.adapter_tokens
        count = shape.num_decodes + len(shape.prefills) or shape.num_samples
        return min(_expected_adapters(self.chances, count), self.num_slots), shape.num_tokens * sum(self.chances)

    def key(self, shape: BatchShape) -> tuple[float, ...]:
        """The part of `shape` that determines the adapters' work; empty without any."""
        num_adapters, num_tokens = self.of(shape)
        return (num_adapters, num_tokens, shape.num_tokens, shape.num_samples) if num_adapters else ()


@lru_cache(4096)
def _expected_adapters(chances: tuple[float, ...], count: int) -> float:
    return sum(1.0 - (1.0 - chance) ** count for chance in chances)


def windowed_contexts(num_seqs: int, context: int, spans: tuple[int, ...]) -> tuple[int, ...]:
    """`BatchShape.decode_windowed` of `num_seqs` equally long sequences with `context` tokens in all."""
    return tuple([_within(context, num_seqs, span) for span in spans])


def _within(context: int, num_seqs: int, span: int) -> int:
    """Visible tokens, under a span, of equally long sequences with `context` tokens in all."""
    return min(context, num_seqs * span)


def decode_shape(num_seqs: int, context: int, spans: tuple[int, ...] = (), queries: int = 1) -> BatchShape:
    """A decode step of `num_seqs` sequences of `context` tokens each, `queries` of them new.

    spans: the model's attention spans, in tokens (`ModelSpec.attention_spans`)"""
    return BatchShape(
        num_tokens=num_seqs * queries,
        num_samples=num_seqs * queries,
        num_decodes=num_seqs,
        decode_context=num_seqs * context,
        decode_windowed=windowed_contexts(num_seqs, num_seqs * context, spans),
        decode_tokens=num_seqs * queries if queries > 1 else 0,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """One operator in one layer on one device.

    name:       "qkv_proj", "flash_prefill", "all_reduce"; several nodes may share a family
    family:     selects achieved fractions: gemm | attention_prefill | attention_decode | attention_sparse | moe | scan
    |
                elementwise | lora | sampling | embedding | collective
    flops:      floating-point operations (a multiply-add is two)
    rate:       dtype of the peak rate, a key of `peak_flops_per_s` (bf16, fp8, int8, ...)
    format:     selects kernels beyond the rate: a number format (fp8_block, int4_wo), or several queries (verify)
    weight_bytes, activation_bytes, kv_bytes: HBM traffic by what it carries (read and written)
    sram_bytes: SRAM-L2 traffic where it differs from HBM's (tiles read again); 0 if not counted
    vector_ops: vector instructions beside the products: dequantizing cached integers
    message:    the collective, for operators that talk to other devices
    num_kernels: launches on the device
    problem:     further sizes that the family's form reads"""

    name: str
    family: str
    flops: float = 0.0
    rate: str = "bf16"
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    kv_bytes: float = 0.0
    sram_bytes: float = 0.0
    message: Message | None = None
    num_kernels: int = 1
    problem: ProblemSize | None = None
    format: str = ""
    vector_ops: float = 0.0

    def problem_as(self, kind: type[E]) -> E:
        """The problem size, checked to be of type `kind`. Raises SpecError for a work of another family."""
        if isinstance(self.problem, kind):
            return self.problem
        raise SpecError(
            f"calibration: family {self.family!r} has a fit whose kernel model reads a {kind.__name__}, and "
            f"{self.name} has {'none' if self.problem is None else f'a {type(self.problem).__name__}'}; give it a fit "
            f"of another kernel model."
        )

    @property
    def hbm_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOP per HBM byte (infinite without traffic)."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else float("inf")
