"""The two types that operators speak: the shape of a step, and the work that one operator does on it.

Both are plain data. A `BatchShape` is the sufficient statistic of a scheduled step: nothing that costs time
depends on which request is which. A `Work` counts FLOPs, bytes per memory level and messages for one device;
how long that takes is the business of `perfmodel.cost`.
"""

__all__ = ["BatchShape", "Depends", "Work", "decode_shape"]

from dataclasses import dataclass
from enum import Enum

from perfmodel.ops.extents import Extent
from perfmodel.ops.messages import Message


class Depends(Enum):
    """Which part of a BatchShape an operator's work is a function of (the cost model memoises by it)."""

    TOKENS = "tokens"  # num_tokens
    ROWS = "rows"  # num_tokens, num_decodes
    GROUP = "group"  # group_tokens
    SAMPLES = "samples"  # num_samples
    PREFILL = "prefill"  # prefills
    DECODE = "decode"  # num_decodes, decode_tokens, decode_context, decode_windowed
    MIXED = "mixed"  # prefills and what DECODE looks at; no work unless the step has both


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a step computes, whole model, before any sharding.

    num_tokens:      query tokens of all grants together
    num_samples:     sequences whose logits are needed (one row of the LM head each)
    prefills:        (query tokens, tokens already in the KV cache) of each grant of more than one token
    num_decodes:     sequences that decode: each gets one token, or verifies drafted ones beside it
    decode_context:  sum over those of their KV length, the new token included
    decode_windowed: for each distinct attention span of the model (`ModelSpec.attention_spans`), the sum over the
                     decodes of min(KV length, span), in that order; empty for models without limited spans
    group_tokens:    query tokens of all data-parallel ranks that share experts with this one, its own included;
                     0: every rank has `num_tokens`
    decode_tokens:   query tokens of all decodes together, those that are verified included; 0: one each
    """

    num_tokens: int
    num_samples: int
    prefills: tuple[tuple[int, int], ...] = ()
    num_decodes: int = 0
    decode_context: int = 0
    decode_windowed: tuple[int, ...] = ()
    group_tokens: int = 0
    decode_tokens: int = 0

    @property
    def num_queries(self) -> int:
        """Query tokens of all decodes together."""
        return self.decode_tokens or self.num_decodes

    @property
    def queries_per_decode(self) -> float:
        """Query tokens of a decode, on average."""
        return self.decode_tokens / self.num_decodes if self.decode_tokens else 1.0


def decode_shape(num_seqs: int, context: int, spans: tuple[int, ...] = (), queries: int = 1) -> BatchShape:
    """The shape of a decode step of `num_seqs` sequences with `context` tokens each, of which `queries` are new."""
    return BatchShape(
        num_tokens=num_seqs * queries,
        num_samples=num_seqs * queries,
        num_decodes=num_seqs,
        decode_context=num_seqs * context,
        decode_windowed=tuple(num_seqs * min(context, span) for span in spans),
        decode_tokens=num_seqs * queries if queries > 1 else 0,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """One operator in one layer on one device.

    name:       as people say it ("qkv_proj", "flash_prefill", "all_reduce"); several nodes may share a family
    family:     which achieved fractions apply: gemm | attention_prefill | attention_decode | moe | scan |
                elementwise | sampling | embedding | collective
    flops:      floating-point operations (a multiply-add is two)
    rate:       the dtype whose peak rate does them, a key of `peak_flops_per_s` (bf16, fp8, int8, ...)
    format:     the number format where the rate does not tell which kernels run (fp8_block, int4_wo)
    weight_bytes, activation_bytes, kv_bytes: HBM traffic by what it carries (read and written)
    sram_bytes: traffic between SRAM and L2 where it differs from HBM traffic (re-reads of tiles); 0 if not counted
    vector_ops: instructions of the vector units beside the products: cached integers made into numbers
    message:    the collective, for operators that talk to other devices
    num_kernels: launches on the device
    extent:     sizes that the form of its family reads beside those figures; None: that has none
    """

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
    extent: Extent | None = None
    format: str = ""
    vector_ops: float = 0.0

    @property
    def hbm_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOP per HBM byte (infinite for work that moves nothing)."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else float("inf")
