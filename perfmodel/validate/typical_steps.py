"""Typical steps of a served scenario: its decode step and the steps that prefill a prompt, the parts of latencies.

TTFT     queue | prefill steps | front end      (queue: what is left: waiting for the running step and for others)
TPOT     the families of the typical decode step, and the host
E2E      its TTFT, and for the rest the parts of TPOT
"""

__all__ = ["TypicalSteps", "latency_breakdown"]

from dataclasses import dataclass
from math import ceil
from typing import Any

from perfmodel.cost import ServerFit, StepEstimate, step_costs
from perfmodel.ops.work import BatchShape
from perfmodel.planning.typical_step import StepChoice, mean_length, typical_step
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.breakdown import why


@dataclass(frozen=True)
class TypicalSteps:
    """label: the decode step as text; prefill_s: of all steps of one prompt; front_end_s: the server's part."""

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
        """The typical steps of `scenario`: with the decode step `choice`, prompts of `prompt` tokens and the front end
        `server`, by default its own typical batch, mean prompt and front end."""
        costs = step_costs(scenario)
        choice = choice or typical_step(scenario, lambda shape: costs.estimate(shape).duration_s)
        lengths, batch = scenario.traffic.input_tokens, choice.shape.num_decodes
        tokens = prompt or (max(1, round(mean_length(lengths))) if lengths else 1)
        new = _new_tokens(scenario, tokens)
        chunk = max(1, min(new, scenario.engine.max_num_batched_tokens - batch))
        num_steps, cached = ceil(new / chunk), tokens - new
        server = server or costs.profile.server
        return cls(
            label=choice.label,
            decode=costs.estimate(choice.shape),
            prefill_label=f"{num_steps} step{'s' * (num_steps > 1)} of {chunk:,} prompt tokens after {cached:,} "
            f"cached, beside {batch:,} decodes",
            prefill_s=num_steps * costs.estimate(_beside(choice.shape, chunk, cached)).duration_s,
            front_end_s=server.in_s
            + server.in_per_prompt_token_s * tokens
            + server.out_s
            + server.out_per_sequence_s * batch,
        )

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the decode step: each operator family, the largest first, and the host."""
        seconds: dict[str, float] = {}
        for row in self.decode.rows:
            seconds[row.work.family] = seconds.get(row.work.family, 0.0) + row.duration_s
        seconds["host"] = self.decode.duration_s - self.decode.device_s
        largest = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: value / self.decode.duration_s for name, value in largest if value > 0}


def latency_breakdown(
    metric: str, predicted_ms: float, measured_ms: float, ttft_ms: float, steps: TypicalSteps
) -> dict[str, Any]:
    """The parts of the predicted latency `metric`, by the scenario's typical `steps`.

    predicted_ms, measured_ms: the latency, ms; ttft_ms: the predicted TTFT of the same requests
    """
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
    """Tokens of a prompt that are not in the prefix cache once it is warm: at least what fills no block."""
    prefix, engine = scenario.traffic.prefix, scenario.engine
    if prefix is None or not engine.enable_prefix_caching:
        return tokens
    shared = tokens - 1 if prefix.num_prompts_per_group else min(prefix.shared_tokens, tokens - 1)
    return tokens - shared // engine.block_size * engine.block_size


def _beside(decodes: BatchShape, new: int, cached: int) -> BatchShape:
    """The decode step with a prompt's chunk in it."""
    return BatchShape(
        num_tokens=decodes.num_tokens + new,
        num_samples=decodes.num_samples + 1,
        prefills=((new, cached),),
        num_decodes=decodes.num_decodes,
        decode_context=decodes.decode_context,
        decode_windowed=decodes.decode_windowed,
    )
