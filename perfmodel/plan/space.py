"""The candidates of a plan: every combination of its space, less what cannot serve, with the reason of each kind.

What does not depend on how requests are scheduled is decided once for a layout; only the memory plan looks at the
largest batch and step as well.
"""

__all__ = ["Space", "enumerate_space"]

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from perfmodel.cost import MemoryPlan, plan_memory, usd_per_hour
from perfmodel.cost.memory import heads_divide
from perfmodel.errors import DoesNotFitError, SpecError
from perfmodel.ops.formats import linear_format
from perfmodel.plan.candidates import Base, Candidate, Layout
from perfmodel.specs.model.architecture import MoEFFN
from perfmodel.specs.plan import PlanSpace, PlanSpec, ratio_of
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.study_file import as_overrides

# Choices that the times of steps depend on, and the fields of a scenario that they set.
_LAYOUT_FIELDS = {
    "hardware": "hardware",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "pipeline_parallel_size": "engine.pipeline_parallel_size",
    "data_parallel_size": "engine.data_parallel_size",
    "enable_expert_parallel": "engine.enable_expert_parallel",
    "quantization": "engine.quantization",
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "speculation": "engine.speculative_config",
}
_MATMULS = ("attention", "dense_ffn", "experts")


@dataclass(frozen=True)
class Space:
    """Candidates that can serve, and how many others each reason has ruled out.

    examples: one sentence for reasons that have more to say
    """

    candidates: tuple[Candidate, ...]
    ruled_out: Mapping[str, int]
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_all(self) -> int:
        return len(self.candidates) + sum(self.ruled_out.values())


class _RefusedError(Exception):
    """A layout or candidate that cannot serve: the reason in a few words, and a sentence about this one."""

    def __init__(self, reason: str, example: str = "") -> None:
        super().__init__(reason)
        self.reason, self.example = reason, example


def enumerate_space(base: Base, spec: PlanSpec) -> Space:
    """The candidates of `spec` for the scenario `base`.

    Raises SpecError where the scenario itself, or a value of the space for it, is wrong.
    """
    scenario = base.load()
    candidates: list[Candidate] = []
    ruled_out: Counter[str] = Counter()
    examples: dict[str, str] = {}

    def refuse(error: _RefusedError, count: int) -> None:
        ruled_out[error.reason] += count
        if error.example:
            examples.setdefault(error.reason, error.example)

    schedules = list(_schedules(spec.space, scenario))
    cluster = scenario.cluster.model_dump(mode="json", include={"router", "kv_transfer"}, exclude_unset=True)
    for choices in _layouts(spec.space):
        try:
            layout = _layout(base, spec, choices, cluster)
        except _RefusedError as error:
            refuse(error, len(schedules))
            continue
        plans: dict[tuple[int, int], MemoryPlan | _RefusedError] = {}
        for seqs, tokens, chunked, ratio in schedules:
            try:
                _check_schedule(layout, spec, seqs, tokens, chunked, ratio)
                if (seqs, tokens) not in plans:
                    plans[seqs, tokens] = _memory(layout, seqs, tokens)
                memory = plans[seqs, tokens]
                if isinstance(memory, _RefusedError):
                    raise memory
            except _RefusedError as error:
                refuse(error, 1)
                continue
            candidates.append(Candidate(layout, seqs, tokens, chunked, ratio, memory))
    return Space(tuple(candidates), dict(ruled_out.most_common()), examples)


def _layouts(space: PlanSpace) -> Iterator[dict[str, Any]]:
    axes = {field: getattr(space, name) for name, field in _LAYOUT_FIELDS.items() if getattr(space, name)}
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _schedules(space: PlanSpace, scenario: Scenario) -> Iterator[tuple[int, int, bool, tuple[int, int] | None]]:
    engine = scenario.engine
    yield from product(
        space.max_num_seqs or (engine.max_num_seqs,),
        space.max_num_batched_tokens or (engine.max_num_batched_tokens,),
        space.enable_chunked_prefill or (engine.enable_chunked_prefill,),
        [ratio_of(text) for text in space.disaggregation] or [None],
    )


def _layout(base: Base, spec: PlanSpec, choices: dict[str, Any], cluster: Mapping[str, Any]) -> Layout:
    """The layout of `choices`. Raises _RefusedError for one that no schedule makes serve."""
    router = {name: cluster[name] for name in ("router",) if name in cluster}
    try:
        scenario = base.load(as_overrides({**choices, "cluster": router}))
    except SpecError as error:
        if _is_about_names(error, choices):
            raise
        raise _RefusedError("the scenario refuses it", str(error)) from None
    _check_cut(scenario, spec)
    rates = {linear_format(scenario.model, name).rate for name in _MATMULS}
    peaks = scenario.hardware.declared.peak_flops_per_s
    missing = sorted(rate for rate in rates if rate.partition("@")[0] not in peaks)
    if missing:
        raise _RefusedError("no units for the number format", f"{scenario.hardware.name} has no {missing[0]} units")
    if spec.objective == "cheapest" or spec.budget_usd_per_hour is not None:
        price = usd_per_hour(scenario.hardware, scenario.price)
        if price is None:
            raise _RefusedError("no price known", f"{scenario.hardware.name} has no price; give price.usd_per_gpu_hour")
    return Layout(choices, scenario, cluster)


def _is_about_names(error: SpecError, choices: Mapping[str, Any]) -> bool:
    """Whether a name of the space is unknown, which is a mistake, not a candidate that is ruled out."""
    return any(f"--set {text}: {text.partition('=')[0]}: " in str(error) for text in as_overrides(choices))


def _check_cut(scenario: Scenario, spec: PlanSpec) -> None:
    engine, model = scenario.engine, scenario.model
    tp, pp, dp = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size
    has_experts = any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers)
    if engine.num_devices > spec.max_gpus:
        raise _RefusedError("more devices than max_gpus")
    if tp > spec.link_domain:
        raise _RefusedError("tensor parallelism beyond the link domain", f"TP{tp} on {spec.link_domain} joined devices")
    if not heads_divide(model, tp):
        raise _RefusedError("attention heads do not divide by tensor_parallel_size")
    if pp > model.num_layers:
        raise _RefusedError("more pipeline stages than layers")
    if dp > 1 and not has_experts:
        raise _RefusedError("data-parallel ranks of a dense model are replicas")
    if engine.enable_expert_parallel and not (has_experts and tp * dp > 1):
        raise _RefusedError("expert parallelism without experts to share out")


def _check_schedule(
    layout: Layout, spec: PlanSpec, seqs: int, tokens: int, chunked: bool, ratio: tuple[int, int] | None
) -> None:
    engine = layout.scenario.engine
    if tokens < seqs and engine.batching == "continuous":
        raise _RefusedError("max_num_batched_tokens below max_num_seqs")
    if not chunked and tokens < (engine.max_model_len or 0):
        # As vLLM: a prompt that is computed at once has to fit.
        raise _RefusedError("unchunked prompts of max_model_len exceed max_num_batched_tokens")
    devices = layout.devices_per_replica * (sum(ratio) if ratio else 1)
    if devices > spec.max_gpus:
        raise _RefusedError("more devices than max_gpus")
    price = usd_per_hour(layout.scenario.hardware, layout.scenario.price)
    if spec.budget_usd_per_hour is not None and (price or 0.0) * devices > spec.budget_usd_per_hour:
        raise _RefusedError("beyond budget_usd_per_hour")
    if ratio is not None and engine.speculative_config is not None:
        raise _RefusedError("speculation beside prefill and decode pools")


def _memory(layout: Layout, seqs: int, tokens: int) -> MemoryPlan | _RefusedError:
    scenario = layout.scenario
    engine = scenario.engine.model_copy(update={"max_num_seqs": seqs, "max_num_batched_tokens": tokens})
    try:
        plan = plan_memory(scenario.model, scenario.hardware, engine)
    except DoesNotFitError as error:
        return _RefusedError("does not fit in memory", str(error))
    if plan.max_context() < (engine.max_model_len or 0):  # vLLM refuses to start
        has = f"{layout.label} keeps {plan.max_context():,} tokens, max_model_len is {engine.max_model_len:,}"
        return _RefusedError("KV cache holds less than max_model_len", has)
    return plan
