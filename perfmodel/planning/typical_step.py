"""The representative step of a scenario: the requested one (`StepSpec`), or the mean decode batch.

Little's law: in a stable system the mean number of running requests is the arrival rate times the decode time of a
request, `B = rate * output tokens * TPOT(B)`. Prompts take a share of time, `p = rate * t_prompt`, in which a sequence
gets one token per prompt; otherwise one per decode step:

    1 / TPOT(B) = rate + (1 - p) / t_step(B)

The smallest such B is found by iterating from 1; unsustainable traffic ends at `max_num_seqs`. Decode-only engines have
p = 0, and TPOT is a step.

`StepReport`: a step by operator: the requested one, the typical one of a scenario, or the mean one of a run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from perfmodel.cost import StepEstimate, plan_memory, scenario_fits, step_costs
from perfmodel.cost.calibrations.for_all import balance_notes
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.errors import DoesNotFitError, SpecError
from perfmodel.files.base import Spec
from perfmodel.files.units import NonNegativeInt, PositiveInt
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.renderable import Renderable
from perfmodel.sim.records.result import RunResult
from perfmodel.sim.traffic.workload import ImagePlan
from perfmodel.specs.engine.formats import serving_notes
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Lengths
from perfmodel.trust import trust_of

_DEFAULT_CONTEXT = 1024  # for traces, whose lengths are known only once they are read
_MAX_ROUNDS = 200


class StepSpec(Spec):
    """One step: `batch` sequences that decode with `context` tokens each, and `prompts` prompts of `prefill` tokens.

    cached: tokens that each prompt already has in the KV cache (an earlier chunk, a prefix)"""

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


def typical_step(scenario: Scenario, step_s: Callable[[BatchShape], float]) -> StepChoice:
    """The decode step at the scenario's mean batch and context; `step_s`: seconds of a step. Without answers, as many
    mean prompts as a step may have; of beams, the prompts that are their tokens."""
    if scenario.model.pooling is not None:
        return _prompts_of_a_step(scenario)
    if scenario.traffic.beam_width > 1:
        return _beams_of_a_step(scenario, step_s)
    context, spans = max(1, round(_mean_context(scenario))), scenario.model.attention_spans
    batch, reason = _mean_batch(
        scenario, lambda size: step_s(decode_shape(size, context, spans)), lambda tokens: step_s(_prefill_shape(tokens))
    )
    return StepChoice(decode_shape(batch, context, spans), f"{_decode_label(batch, context)} ({reason})")


def _prompts_of_a_step(scenario: Scenario) -> StepChoice:
    engine, traffic = scenario.engine, scenario.traffic
    tokens = round(mean_prompt(scenario))
    replicas = max(scenario.cluster.replicas, 1) * engine.data_parallel_size
    in_flight = ceil((traffic.arrivals.concurrency or engine.max_num_seqs * replicas) / replicas)
    count = max(1, min(engine.max_num_batched_tokens // tokens, engine.max_num_seqs, in_flight))
    shape = BatchShape(count * tokens, count, ((tokens, 0),) * count)
    return StepChoice(
        shape, f"{count:,} prompt{'' if count == 1 else 's'} of {tokens:,} tokens (as many as a step takes)"
    )


def _beams_of_a_step(scenario: Scenario, step_s: Callable[[BatchShape], float]) -> StepChoice:
    """As many beams as the front end asks for during a step (`perfmodel.sim.replica.beams`), at most half of those of
    all answers under way: the first of an answer has a step of its own."""
    engine, traffic, width = scenario.engine, scenario.traffic, scenario.traffic.beam_width
    replicas, arrivals = max(scenario.cluster.replicas, 1), scenario.traffic.arrivals
    context = max(1, round(_mean_context(scenario)))
    computed = min(round((engine.kv_block_tokens + 1) / 2), context) if engine.enable_prefix_caching else context
    per_s = 1 / scenario_fits(scenario)[1].server.beam_s
    if arrivals.rate and traffic.output_tokens is not None:
        per_s = min(per_s, arrivals.rate / replicas * (1 + width * (mean_length(traffic.output_tokens) - 1)))
    in_flight = arrivals.concurrency or (traffic.num_requests if arrivals.process == "burst" else None)
    of_answers = engine.max_num_seqs if in_flight is None else width * in_flight / replicas / 2
    limit = max(1, round(min(of_answers, engine.max_num_seqs, engine.max_num_batched_tokens / computed)))

    def shape_of(count: int) -> BatchShape:
        return BatchShape(count * computed, count, ((computed, context - computed),) * count)

    count = min(max(1, width // 2), limit)
    while count < limit and (needed := min(round(per_s * step_s(shape_of(count))), limit)) > count:
        count = needed
    label = f"{count:,} beams with {context:,} tokens each, of which a step computes {computed:,}"
    return StepChoice(shape_of(count), f"{label} (as many as are asked for during a step)")


def engine_of_step(scenario: Scenario, is_prompt: bool = False) -> Scenario:
    """The scenario as seen by the replica that decodes or (`is_prompt`) prefills, which differ if disaggregated."""
    if not scenario.cluster.is_disaggregated:
        return scenario
    role = "prefill" if is_prompt else "decode"
    return scenario.of_pool(next(pool for pool in scenario.pools if pool.role == role))


def mean_length(lengths: Lengths) -> float:
    """Mean of a length distribution before clipping; a plausible value if a file has the lengths."""
    return lengths.mean_tokens or float(_DEFAULT_CONTEXT)


def mean_prompt(scenario: Scenario) -> float:
    """Mean tokens of a prompt, its images included."""
    traffic = scenario.traffic
    text = mean_length(traffic.input_tokens) if traffic.input_tokens is not None else _DEFAULT_CONTEXT
    return text + (ImagePlan(scenario).mean_tokens if traffic.images is not None else 0)


def _prefill_shape(tokens: int) -> BatchShape:
    return BatchShape(num_tokens=tokens, num_samples=1, prefills=((tokens, 0),))


def _decode_label(batch: int, context: int) -> str:
    return f"Decode of {batch:,} sequence{'' if batch == 1 else 's'} with {context:,} tokens each"


def _mean_context(scenario: Scenario) -> float:
    """Mean KV length over a request's decode steps: the prompt and half the answer."""
    traffic = scenario.traffic
    if traffic.input_tokens is None or traffic.output_tokens is None:
        return _DEFAULT_CONTEXT
    return mean_prompt(scenario) + mean_length(traffic.output_tokens) / 2


def _mean_batch(
    scenario: Scenario, step_s: Callable[[int], float], prompt_s: Callable[[int], float]
) -> tuple[int, str]:
    """Batch, and the reason. step_s: seconds by decodes; prompt_s: by prompt tokens"""
    arrivals, limit = scenario.traffic.arrivals, engine_of_step(scenario).engine.max_num_seqs
    decoding = [pool for pool in scenario.pools if pool.role in ("unified", "decode") and not pool.shadow]
    replicas = sum(max(pool.replicas, 1) * pool.engine.data_parallel_size for pool in decoding)
    if arrivals.process == "closed_loop" and arrivals.concurrency:
        return max(1, min(limit, round(arrivals.concurrency / replicas))), "as many as the closed loop holds"
    rate, prompt, output = arrivals.rate, scenario.traffic.input_tokens, scenario.traffic.output_tokens
    if not rate and (duration_s := sum(stage.duration_s for stage in arrivals.stages)):
        rate = sum(stage.rate * stage.duration_s for stage in arrivals.stages) / duration_s
    if rate is None or output is None:
        return max(1, limit // 2), "half of max_num_seqs"
    own, prompts_per_s, left = rate / replicas, 0.0, 1.0
    if prompt is not None and not scenario.cluster.is_disaggregated:
        prompts_per_s = own
        shares_kv = replicas == 1 and scenario.engine.enable_prefix_caching  # the answers of a prompt
        of_each = own / scenario.traffic.samples_per_prompt if shares_kv else own
        left = 1.0 - of_each * prompt_s(max(1, round(mean_prompt(scenario))))
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


@dataclass(frozen=True, repr=False)
class StepReport(Renderable):
    """A step's estimate, operator by operator. assumed: sentences on values the scenario leaves open"""

    scenario: Scenario
    label: str
    shape: BatchShape
    estimate: StepEstimate
    assumed: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Sentences on assumptions, approximations, formats not multiplied as stored, ineffective expert balancing."""
        engine = engine_of_step(self.scenario, is_prompt=not self.shape.num_decodes)
        served = serving_notes(engine.model, engine.engine, engine.hardware)
        return [*self.assumed, *served, *balance_notes(self.scenario, engine.engine)]

    def columns(self) -> dict[str, NDArray[Any]]:
        """The estimate's columns."""
        return self.estimate.columns()

    def to_json(self) -> dict[str, Any]:
        """Quantities are totals over an operator's `count` runs on one device."""
        estimate, shape = self.estimate, self.shape
        return {
            "scenario": self.scenario.name,
            "step": self.label,
            "num_tokens": shape.num_tokens,
            "num_decodes": shape.num_decodes,
            "decode_context": shape.decode_context,
            "duration_s": estimate.duration_s,
            "device_s": estimate.device_s,
            "flops": estimate.flops,
            "hbm_bytes": estimate.hbm_bytes,
            "mfu": estimate.mfu,
            "mbu": estimate.mbu,
            "bound_share": estimate.bound_share,
            "origin": estimate.origin,
            **({} if estimate.pipeline is None else {"pipeline": asdict(estimate.pipeline)}),
            "operators": [row.to_json() for row in estimate.rows],
            "notes": self.notes,
            "trust": trust_of(self.scenario).to_json(),
            "provenance": self.provenance("step"),
        }

    def provenance(self, kind: str) -> dict[str, Any]:
        """Versions, calibrations and inputs of a `kind` answer about this step."""
        inputs = {"scenario": resolved(self.scenario), "step": self.shape._asdict()}
        return provenance_of([self.scenario]).to_json(kind, inputs)


def estimate_choice(
    scenario: Scenario, batch: int | None = None, context: int | None = None, prefill: int | None = None
) -> StepReport:
    """The requested step, else the typical one of `scenario`, estimated as the simulator does: `batch` sequences
    decoding at `context` tokens each, or one prompt of `prefill` tokens. Raises DoesNotFitError for a step beyond the
    devices' KV blocks."""
    engine = engine_of_step(scenario, is_prompt=prefill is not None)
    costs = step_costs(engine)
    if scenario.model.pooling is not None and (batch, context) != (None, None):
        raise SpecError(f"{scenario.model.name} returns no text, so no step decodes; leave batch and context out.")
    if prefill is not None:
        shape, label = _prefill_shape(prefill), f"Prefill of {prefill:,} tokens"
    elif batch is None and context is None:
        choice = typical_step(scenario, lambda step: costs.estimate(step).duration_s / costs.tokens_per_decode(step))
        shape, label = choice.shape, choice.label
    else:
        sequences, tokens = batch or 1, context or round(_mean_context(scenario))
        shape = decode_shape(sequences, tokens, scenario.model.attention_spans)
        label = _decode_label(sequences, tokens)
    if (batch, context, prefill) != (None, None, None) and engine.engine.kv_cache != "off":
        plan = plan_memory(engine.model, engine.hardware, engine.engine)
        sequences = shape.num_decodes or len(shape.prefills)
        most = plan.max_batch(shape.decode_context // sequences if shape.num_decodes else sum(shape.prefills[0]))
        if sequences > most:  # no run has it
            way_out = f"{most:,} sequences of so many" if most else f"{plan.max_context():,} tokens of one sequence"
            raise DoesNotFitError(
                f"{label}: the KV cache of {plan.num_devices} x {plan.hardware} holds {plan.max_tokens:,} tokens, "
                f"at most {way_out}; ask for fewer, or give it more devices."
            )
    depth = costs.draft_depth(shape)
    if depth and costs.drafts is not None:
        label += f", each with {costs.drafts.config.nodes_by_depth[depth]} drafted tokens to verify"
        if costs.drafts.config.acceptance is not None:
            label += f" ({costs.tokens_per_decode(shape):.2f} tokens a step expected)"
    return StepReport(scenario, label, shape, costs.estimate(shape))


def estimate_mean_step(result: RunResult) -> StepReport:
    """The run's mean decode step; the scenario's typical one without step records or decodes."""
    choice = mean_step(result)
    if choice is None:
        return estimate_choice(result.scenario)
    return StepReport(result.scenario, choice.label, choice.shape, step_costs(result.scenario).estimate(choice.shape))


def mean_step(result: RunResult) -> StepChoice | None:
    """The decode step at a run's mean batch and context; None without step records or decodes."""
    steps, mean_batch = result.steps, result.summary["mean_batch"]
    if steps is None or mean_batch is None:
        return None
    batch = max(1, round(mean_batch))
    tokens = float(np.dot(steps.num_steps, steps.decode_context)) / float(np.dot(steps.num_steps, steps.num_decodes))
    context = max(1, round(tokens))
    shape = decode_shape(batch, context, result.scenario.model.attention_spans)
    return StepChoice(shape, f"Decode of {batch:,} sequences with {context:,} tokens each (the run's mean batch)")
