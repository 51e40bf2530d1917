"""The step that represents a scenario: the one that is asked for (`StepSpec`), or the batch to look at when none is.

Little's law ties the batch to the traffic: in a stable system the mean number of running requests is the arrival rate
times the time that a request spends decoding, `B = rate * output tokens * TPOT(B)`. Prompts take a share of the time,
`p = rate * t_prompt`, in which a sequence gets one token a prompt; in the rest one a decode step:

    1 / TPOT(B) = rate + (1 - p) / t_step(B)

The smallest such B is found by iterating from 1; traffic that no batch can keep up with ends at `max_num_seqs`, which
is then what would be seen. Prompts of engines that only decode are computed elsewhere: p = 0, and TPOT is a step.
"""

__all__ = ["StepChoice", "StepSpec", "choose_step", "engine_of_step", "mean_length", "typical_step"]

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import model_validator

from perfmodel.files.base import Spec
from perfmodel.files.units import NonNegativeInt, PositiveInt
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Lengths

_DEFAULT_CONTEXT = 1024  # for traces, whose lengths are known only once they are read
_MAX_ROUNDS = 200


class StepSpec(Spec):
    """One step: `batch` sequences that decode with `context` tokens each, and `prompts` prompts of `prefill` tokens.

    cached: tokens that each prompt already has in the KV cache (an earlier chunk, a prefix)
    """

    batch: NonNegativeInt = 0
    context: PositiveInt | None = None
    prefill: NonNegativeInt = 0
    prompts: PositiveInt = 1
    cached: NonNegativeInt = 0

    @model_validator(mode="after")
    def _does_something(self) -> "StepSpec":
        if not self.batch and not self.prefill:
            raise ValueError("needs `batch` and `context` (sequences that decode), `prefill` (a prompt), or both")
        if bool(self.batch) != (self.context is not None):
            raise ValueError("`batch` and `context` go together: so many sequences, so many tokens in each one's KV")
        return self


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A step's shape, and its description."""

    shape: BatchShape
    label: str


def choose_step(
    scenario: Scenario,
    step_s: Callable[[BatchShape], float],
    batch: int | None = None,
    context: int | None = None,
    prefill: int | None = None,
) -> StepChoice:
    """The step asked for: a prefill of `prefill` tokens, a decode of `batch` sequences with `context` tokens each, or
    the typical one of `scenario`.

    step_s: seconds of a step
    """
    if prefill is not None:
        shape = BatchShape(num_tokens=prefill, num_samples=1, prefills=((prefill, 0),))
        return StepChoice(shape, f"Prefill of {prefill:,} tokens")
    if batch is None and context is None:
        return typical_step(scenario, step_s)
    sequences, tokens = batch or 1, context or round(_mean_context(scenario))
    return StepChoice(decode_shape(sequences, tokens, scenario.model.attention_spans), _decode_label(sequences, tokens))


def typical_step(scenario: Scenario, step_s: Callable[[BatchShape], float]) -> StepChoice:
    """The decode step at the scenario's mean batch and mean context."""
    context = max(1, round(_mean_context(scenario)))
    spans = scenario.model.attention_spans
    batch, reason = _mean_batch(scenario, lambda size: step_s(decode_shape(size, context, spans)), _prompt_s(step_s))
    return StepChoice(decode_shape(batch, context, spans), f"{_decode_label(batch, context)} ({reason})")


def engine_of_step(scenario: Scenario, is_prompt: bool = False) -> Scenario:
    """The scenario as a replica sees it that takes a decode step, or (`is_prompt`) one of prompts alone: they are of
    different pools in a disaggregated cluster, and of any replica elsewhere."""
    if not scenario.cluster.is_disaggregated:
        return scenario
    role = "prefill" if is_prompt else "decode"
    return scenario.of_pool(next(pool for pool in scenario.pools if pool.role == role))


def mean_length(lengths: Lengths) -> float:
    """The mean of a length distribution before clipping, a plausible one where a file has the counts."""
    return lengths.mean_tokens or float(_DEFAULT_CONTEXT)


def _decode_label(batch: int, context: int) -> str:
    return f"Decode of {batch:,} sequence{'' if batch == 1 else 's'} with {context:,} tokens each"


def _mean_context(scenario: Scenario) -> float:
    """A request's mean KV length over its decode steps: the prompt and half of the answer."""
    traffic = scenario.traffic
    if traffic.input_tokens is None or traffic.output_tokens is None:
        return _DEFAULT_CONTEXT
    return mean_length(traffic.input_tokens) + mean_length(traffic.output_tokens) / 2


def _prompt_s(step_s: Callable[[BatchShape], float]) -> Callable[[int], float]:
    """Seconds of a prompt of so many tokens, as one step."""
    return lambda tokens: step_s(BatchShape(num_tokens=tokens, num_samples=1, prefills=((tokens, 0),)))


def _mean_batch(
    scenario: Scenario, step_s: Callable[[int], float], prompt_s: Callable[[int], float]
) -> tuple[int, str]:
    arrivals, limit = scenario.traffic.arrivals, engine_of_step(scenario).engine.max_num_seqs
    decoding = [pool for pool in scenario.pools if pool.role != "prefill" and not pool.shadow]
    replicas = sum(max(pool.replicas, 1) * pool.engine.data_parallel_size for pool in decoding)
    if arrivals.process == "closed_loop" and arrivals.concurrency:
        return max(1, min(limit, round(arrivals.concurrency / replicas))), "as many as the closed loop holds"
    rate = arrivals.rate or _mean_stage_rate(scenario)
    output = scenario.traffic.output_tokens
    if rate is None or output is None:
        return max(1, limit // 2), "half of max_num_seqs"
    own, prompt = rate / replicas, scenario.traffic.input_tokens
    prompts_per_s, left = 0.0, 1.0
    if prompt is not None and not scenario.cluster.is_disaggregated:
        prompts_per_s = own
        left = 1.0 - own * prompt_s(max(1, round(mean_length(prompt))))
    cannot = f"decoding alone cannot keep up with {rate:g} req/s" if left > 0 else "prompts alone take all of the time"
    batch = 1.0
    for _ in range(_MAX_ROUNDS):
        tokens_per_s = prompts_per_s + max(left, 0.0) / step_s(max(1, round(batch)))
        needed = own * mean_length(output) / tokens_per_s
        if left <= 0 or needed >= limit:
            return limit, f"max_num_seqs: {cannot}"
        if round(needed) <= round(batch):
            break
        batch = needed
    return max(1, round(batch)), f"the batch to expect at {rate:g} req/s by Little's law"


def _mean_stage_rate(scenario: Scenario) -> float | None:
    stages = scenario.traffic.arrivals.stages
    duration = sum(stage.duration_s for stage in stages)
    return sum(stage.rate * stage.duration_s for stage in stages) / duration if duration else None
