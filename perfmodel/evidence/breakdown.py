"""Where a prediction's time goes, and which part would have to change to meet the measurement.

A breakdown is {"parts": {name: share}, "why": sentence, ...}. Shares of the prediction add up to one; the sentence
blames the largest part alone, which shows how plausible that is. Kernel rows are grouped by size: FLOPs of kernels,
payload bytes of messages, counted from the kernel models' sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import ServerFit, StepEstimate, step_costs
from perfmodel.cost.kernel_models.attention.decode import DecodeSizes
from perfmodel.cost.kernel_models.attention.latent import LatentSizes
from perfmodel.cost.kernel_models.attention.prefill import PrefillSizes
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.experts import ExpertSizes
from perfmodel.cost.kernel_models.fits import take
from perfmodel.cost.kernel_models.gemm import GemmSizes
from perfmodel.cost.kernel_models.messages.collective import CollectiveSizes, ExchangeSizes
from perfmodel.cost.kernel_models.module import ModuleSizes
from perfmodel.evidence.fit.kernels import timed
from perfmodel.evidence.report import NOT_APPLICABLE, Dimension, range_names
from perfmodel.evidence.sources.kernels import Group
from perfmodel.ops.problem_sizes import DecodeSize, HeadShape
from perfmodel.ops.work import BatchShape
from perfmodel.planning.typical_step import StepChoice, mean_length, typical_step
from perfmodel.specs.scenario import Scenario

_NOTHING = 0.05  # of a part: like leaving it out
_CLOSE = 0.02  # of the measured value: nothing to explain below
_ROWS = (16, 128, 1024, 8192)  # M of matrix multiplications, tokens of experts and projections
_CONTEXT = (512, 2048, 8192, 32768)  # KV tokens of a sequence
_MAX_DECADES = 20


def why(predicted: float, measured: float, shares: Mapping[str, float], whole: str) -> str:
    """The largest part, and the factor on it alone that turns `predicted` into `measured` (same unit). shares: of each
    part of the prediction; whole: its name"""
    if not predicted:  # the time per token after the first, of answers of one
        return "predicted 0"
    ratio = measured / predicted
    head = f"measured {ratio:.2f}x predicted"
    name, share = max(shares.items(), key=lambda item: item[1])
    if abs(ratio - 1) < _CLOSE or share <= 0 or not ratio:
        return head
    factor = 1 + (ratio - 1) / share
    largest = f"{share:.0%} of {whole} is {name}"
    if factor < _NOTHING:
        return f"{head}: {largest}; without it the prediction would still be {(1 - share) / ratio:.2f}x the measurement"
    return f"{head}: {largest}; it would have to take {factor:.2f}x"


def kernel_breakdown(predicted: float, measured: float, compute: float, memory: float) -> dict[str, Any]:
    """Parts of a kernel's time: seconds of each resource alone (they overlap), bound, and overhead. predicted,
    measured: seconds; compute, memory: predicted seconds of each resource"""
    bound, longest = ("memory", memory) if memory >= compute else ("compute", compute)
    overhead = max(0.0, predicted - longest)
    shares = {bound: min(longest, predicted) / predicted, "overhead": overhead / predicted}
    seconds = {"compute_s": compute, "memory_s": memory, "overhead_s": overhead}
    return _with_bound(shares, seconds, why(predicted, measured, shares, "the kernel"))


def _with_bound(shares: Mapping[str, float], seconds: Mapping[str, float], reason: str) -> dict[str, Any]:
    return {"parts": shares, **seconds, "bound": max(shares, key=lambda name: shares[name]), "why": reason}


def kernel_sizes(sizes: Any) -> dict[str, Dimension]:
    """Decades of FLOPs or bytes as `work`; `M` (matrix rows, tokens of experts) and `context` if present."""
    rows: Any = None
    context: Any = None
    unit = "FLOP"
    match sizes:
        case CollectiveSizes() | ExchangeSizes():
            work, unit = sizes.payload, "B"
        case GemmSizes(problem=problem):
            work, rows = 2 * problem.m * problem.n * problem.k * problem.batch, problem.m
        case ExpertSizes(problem=problem):
            work, rows = 2 * problem.assignments * problem.width * problem.inner * (problem.gates + 1), problem.tokens
        case LatentSizes():
            flops, context = _attention(sizes.attention)
            work, rows = 2 * sizes.tokens * sizes.weights + flops, sizes.tokens
        case ModuleSizes():
            work, rows = 2 * sizes.tokens * sizes.weights + sizes.attention_flops + sizes.index_flops, sizes.tokens
        case _:
            work, context = _attention(sizes)
    powers = np.clip(np.floor(np.log10(np.maximum(work, 1.0))), 0, _MAX_DECADES - 1).astype(np.int64)
    none = Dimension((NOT_APPLICABLE,), np.zeros(len(work), dtype=np.int64))
    return {
        "work": Dimension(tuple(f"1e{power} {unit}" for power in range(_MAX_DECADES)), powers),
        "M": none if rows is None else range_names(rows, _ROWS),
        "context": none if context is None else range_names(context, _CONTEXT, "tokens"),
    }


def _attention(sizes: DecodeSizes | PrefillSizes) -> tuple[NDArray[np.float64], Any]:
    """Causal FLOPs of both attention products, and the context; windows are ignored: this only sorts rows by size."""
    if isinstance(sizes, DecodeSizes):
        flops = sizes.problem.num_seqs * sizes.length * sizes.problem.query_rows * sizes.flops_per_token
        return np.asarray(flops), sizes.length
    pairs = sizes.tokens * sizes.cached + sizes.tokens * (sizes.tokens + 1) / 2
    flops = 2.0 * sizes.count * pairs * sizes.heads.num_heads * sizes.heads.head_size
    return np.asarray(flops), sizes.tokens + sizes.cached


def row_breakdown(group: Group, row: int, fit: Any, device: DeviceFacts, predicted: float) -> dict[str, Any]:
    """Parts of a group's row number `row`, timed as its table was; none for a module measured as a whole. fit, device:
    of its kernel; predicted: seconds"""
    measured, one = float(group.seconds[row]), take(group.sizes, np.array([row]))
    if isinstance(one, LatentSizes):
        lengths = _numbers(one.attention)
        head = f"measured {measured / predicted:.2f}x predicted"
        return {
            "sizes": lengths,
            "why": f"{head}: projections and attention of {lengths['heads']:g} heads in one number",
        }
    parts = timed(one, fit, device)
    if isinstance(one, CollectiveSizes | ExchangeSizes):
        wire = float(parts.wire[0])  # bytes on the wire, and the rest: launches, hops
        shares = {"communication": min(wire / predicted, 1.0), "overhead": max(0.0, 1 - wire / predicted)}
        seconds = {"communication_s": wire, "overhead_s": max(0.0, predicted - wire)}
        because = why(predicted, measured, shares, "the message")
        return {"sizes": _numbers(one)} | _with_bound(shares, seconds, because)
    compute, memory = (float(np.ravel(part)[0]) for part in (parts.compute, parts.memory))
    return {"sizes": _numbers(one)} | kernel_breakdown(predicted, measured, compute, memory)


def _numbers(sizes: Any) -> dict[str, float]:
    """A row's sizes by name, problem sizes included."""
    values = {name: np.ravel(value) for name, value in _fields(sizes)}
    return {name: float(value[0]) for name, value in values.items() if value.size == 1}


def _fields(sizes: Any) -> Iterator[tuple[str, Any]]:
    for name, value in zip(sizes._fields, sizes, strict=True):
        if isinstance(value, DecodeSize):
            yield "seqs", value.num_seqs
        if isinstance(value, DecodeSize | HeadShape):
            heads = value if isinstance(value, HeadShape) else value.heads
            yield from (("heads", heads.num_heads), ("kv_heads", heads.num_kv_heads), ("window", heads.window))
            if heads is value:
                yield "head_size", heads.head_size
        elif hasattr(value, "_fields"):
            yield from _fields(value)
        elif name != "rate":
            yield name, value


@dataclass(frozen=True)
class TypicalSteps:
    """Typical steps of a scenario. prefill_s: of all steps of one prompt; front_end_s: the server's part"""

    label: str
    decode: StepEstimate
    prefill_label: str
    prefill_s: float
    front_end_s: float

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        choice: StepChoice | None = None,
        prompt: int | None = None,
        server: ServerFit | None = None,
    ) -> "TypicalSteps":
        """Typical steps of `scenario`, with decode step `choice`, prompts of `prompt` tokens and front end `server`;
        defaults: its typical batch, mean prompt and own front end."""
        costs = step_costs(scenario)
        choice = choice or typical_step(scenario, lambda shape: costs.estimate(shape).duration_s)
        decodes, lengths = choice.shape, scenario.traffic.input_tokens
        batch = decodes.num_decodes
        tokens = prompt or (max(1, round(mean_length(lengths))) if lengths else 1)
        new = _new_tokens(scenario, tokens)
        chunk = max(1, min(new, scenario.engine.max_num_batched_tokens - batch))
        num_steps, cached = ceil(new / chunk), tokens - new
        chunked = decodes.num_tokens + chunk, decodes.num_samples + 1, ((chunk, cached),)
        with_chunk = BatchShape(*chunked, batch, decodes.decode_context, decodes.decode_windowed)
        server = server or costs.profile.server
        return cls(
            label=choice.label,
            decode=costs.estimate(decodes),
            prefill_label=f"{num_steps} step{'s' * (num_steps > 1)} of {chunk:,} prompt tokens after {cached:,} "
            f"cached, beside {batch:,} decodes",
            prefill_s=num_steps * costs.estimate(with_chunk).duration_s,
            front_end_s=server.in_s
            + server.in_per_prompt_token_s * tokens
            + server.out_s
            + server.out_per_sequence_s * batch,
        )

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the decode step: operator families, largest first, and the host."""
        seconds: dict[str, float] = {}
        for row in self.decode.rows:
            seconds[row.work.family] = seconds.get(row.work.family, 0.0) + row.duration_s
        seconds["host"] = self.decode.duration_s - self.decode.device_s
        largest = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: value / self.decode.duration_s for name, value in largest if value > 0}


def latency_breakdown(
    metric: str, predicted_ms: float, measured_ms: float, ttft_ms: float, steps: TypicalSteps
) -> dict[str, Any]:
    """Parts of the predicted latency `metric`, from the typical `steps`. predicted_ms, measured_ms: the latency;
    ttft_ms: the predicted TTFT of the same requests"""
    if metric.startswith("ttft"):
        prefill, front_end = steps.prefill_s * 1e3, steps.front_end_s * 1e3
        known = min(1.0, predicted_ms / (prefill + front_end))  # a mean prompt may take longer than this one
        shares = {"prefill step": known * prefill / predicted_ms, "front end": known * front_end / predicted_ms}
        shares["queue"] = max(0.0, 1 - sum(shares.values()))
        return {
            "parts": shares,
            "prefill_steps": steps.prefill_label,
            "why": why(predicted_ms, measured_ms, shares, "TTFT"),
        }
    shares, whole = steps.shares, "the step"
    if metric.startswith("e2el"):
        first = min(1.0, ttft_ms / predicted_ms)
        shares = {"TTFT": first} | {name: (1 - first) * share for name, share in shares.items()}
        whole = "the latency"
    return {
        "parts": shares,
        "step": steps.label,
        "step_ms": steps.decode.duration_s * 1e3,
        "operators": [
            {
                "name": row.name,
                "family": row.work.family,
                "ms": row.duration_s * 1e3,
                "share": row.duration_s / steps.decode.duration_s,
                "bound": row.bound,
            }
            for row in sorted(steps.decode.rows, key=lambda row: -row.duration_s)
        ],
        "why": why(predicted_ms, measured_ms, shares, whole),
    }


def _new_tokens(scenario: Scenario, tokens: int) -> int:
    """Prompt tokens missing from a warm prefix cache: at least the partial block."""
    prefix, engine = scenario.traffic.prefix, scenario.engine
    if prefix is None or not engine.enable_prefix_caching:
        return tokens
    shared = tokens - 1 if prefix.num_prompts_per_group else min(prefix.shared_tokens, tokens - 1)
    return tokens - shared // engine.block_size * engine.block_size
