"""No value is ignored: a field that the variant does not use is rejected, and the fields that it uses are named."""

from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from perfmodel import load_scenario
from perfmodel.errors import SpecError
from perfmodel.files.base import Spec, VariantSpec
from perfmodel.models.cards import load_model
from perfmodel.specs import Scenario

SAMPLES: dict[str, Any] = {
    "alpha": 1.0,
    "batch_timeout_ms": 50.0,
    "concurrency": 4,
    "cv": 2.0,
    "dispersion": 0.5,
    "draft_layers": 2,
    "has_own_device": True,
    "high": 9,
    "lookahead": {},
    "low": 3,
    "mean": 100.0,
    "measured": "acceptance.json",
    "catalog": {},
    "min_p": 0.1,
    "model": load_model("tiny-llama"),
    "order": "longest_prompt_first",
    "p99": 400.0,
    "path": "counts.txt",
    "per_position": (0.5,),
    "per_rank": ((0.5,),),
    "pipelined": True,
    "popularity": (1.0, 2.0),
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
    "quantization": "w4a16",
    "rate": 0.5,
    "stages": ({"rate": 1.0, "duration_s": 1.0},),
    "std": 50.0,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_max_tree_depth": 9,
    "temperature": 0.5,
    "think_time_s": 1.0,
    "think_time_stddev_s": 0.5,
    "top_k": 20,
    "top_p": 0.5,
    "tree": (2, 2),
    "value": 7,
    "values": (1, 2),
}
# Fields with a choice on which no other field of theirs depends.
USED_BY_ALL = {
    "Arrivals.order",
    "AutoscalingSpec.metric",
    "ClusterSpec.router",
    "Conversations.format",
    "DynamoSpec.optimization_target",
    "GatewaySpec.scheduling_policy",
    "EngineSpec.all2all_backend",
    "EngineSpec.attention",  # its one dependent field has its own sentence
    "EngineSpec.backend",
    "EngineSpec.convert",
    "EngineSpec.dtype",
    "EngineSpec.flash_attn_version",
    "EngineSpec.float32_matmul_precision",
    "EngineSpec.kv_cache",  # with sentences of its own: `kv_tiers`, `kv_eviction` and others need pages
    "EngineSpec.lora_target_modules",
    "EngineSpec.mamba_ssm_cache_dtype",
    "EngineSpec.max_lora_rank",
    "EngineSpec.mm_encoder_tp_mode",
    "EngineSpec.quantization_group_size",
    "EngineSpec.reserve_output",
    "EngineSpec.runner",
    "EngineSpec.scheduling_policy",
    "Images.encoding",
    "KvOffload.load",
    "KvOffload.rule",
    "KvOffload.storage_prefetch_policy",
    "KvOffload.write_policy",
    "Pause.distribution",
    "PoolSpec.role",
    "PoolerConfig.pooling_type",
    "PoolSpec.router",
    "Price.kind",
    "PriceOverride.kind",
    "ScalingPolicy.type",
    "ScalingRules.select_policy",
    "Trace.format",
    "StructuredOutputsConfig.backend",
}


def specs_in(kind: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """All specs that fields of `kind` hold, itself among them."""
    if kind in seen:
        return seen
    seen.add(kind)
    for field in kind.model_fields.values():
        for model in models_of(field.annotation):
            specs_in(model, seen)
    return seen


def models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_of(argument)]


def choices_of(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return tuple(choice for each in get_args(annotation) for choice in (choices_of(each) or (each,)))
    return tuple(choice for argument in get_args(annotation) for choice in choices_of(argument))


WHOLE = sorted(specs_in(Scenario, set()), key=lambda spec: spec.__name__)
VARIANTS = [spec for spec in WHOLE if issubclass(spec, VariantSpec)]
UNUSED = [
    (spec, kind, name)
    for spec in VARIANTS
    if spec.discriminator
    for kind in choices_of(spec.model_fields[spec.discriminator].annotation)
    for name in spec.unused_fields(kind)
]


@pytest.mark.parametrize(("spec", "kind", "name"), UNUSED, ids=lambda each: getattr(each, "__name__", str(each)))
def test_unused_fields_are_rejected(spec: type[VariantSpec], kind: str, name: str) -> None:
    own = [field for field, kinds in spec.used_by.items() if kind in kinds]
    given = {spec.discriminator: kind, **{field: SAMPLES[field] for field in own[:1]}, name: SAMPLES[name]}
    with pytest.raises(ValidationError) as error:
        spec.model_validate(given)
    sentence = str(error.value)
    assert f"got {name} with {spec.discriminator}={kind}" in sentence
    assert all(field in sentence for field in (own or ["no fields of its own"]))


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.__name__)
def test_alternatives_are_mutually_exclusive(spec: type[VariantSpec]) -> None:
    for group in spec.alternatives:
        for first, second in pairwise(group):
            kinds = spec.used_by.get(first, ("",))
            given = {spec.discriminator: kinds[0]} if spec.discriminator else {}
            with pytest.raises(ValidationError, match=f"got {first} and {second}; expected only one"):
                spec.model_validate({**given, first: SAMPLES[first], second: SAMPLES[second]})


def test_every_choice_of_a_scenario_declares_the_fields_it_uses() -> None:
    """A new field with a choice is entered in `used_by` of its spec, or here with those that all kinds read."""
    chosen = {f"{spec.__name__}.{spec.discriminator}" for spec in VARIANTS if issubclass(spec, VariantSpec)}
    choices = {
        f"{spec.__name__}.{name}"
        for spec in WHOLE
        for name, field in spec.model_fields.items()
        if issubclass(spec, Spec) and len(choices_of(field.annotation)) > 1
    }
    of_scenarios = {choice for choice in choices if is_of_a_scenario(choice.split(".")[0])}
    assert sorted(of_scenarios - chosen - USED_BY_ALL) == []


def is_of_a_scenario(name: str) -> bool:
    """Whether the spec is what a scenario's author writes: not a device's, a model's or an engine's description."""
    spec = next(spec for spec in WHOLE if spec.__name__ == name)
    return spec.__module__.startswith("perfmodel.specs.") and ".hardware" not in spec.__module__


# ------------------------------------------------------------------ --set


def test_set_of_another_variant_drops_the_fields_of_the_previous_one() -> None:
    lengths = load_scenario(
        "llama-3.1-8b-a100",
        ["traffic.input_tokens.distribution=fixed", "traffic.input_tokens.value=4096"],
    ).traffic.input_tokens
    assert lengths is not None
    assert (lengths.distribution, lengths.value, lengths.mean, lengths.p99) == ("fixed", 4096, None, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("traffic.input_tokens.value=4096", "got value with distribution=lognormal, which uses mean, p99, std"),
        ("traffic.arrivals.concurrency=8", "got concurrency with process=poisson, which uses rate"),
        ("engine.batch_timeout_ms=5", "got batch_timeout_ms with batching=continuous"),
    ],
)
def test_unused_overrides_are_rejected(change: str, words: str) -> None:
    with pytest.raises(SpecError, match=f"--set {change}.*{words}|{words}"):
        load_scenario("llama-3.1-8b-a100", [change])


def test_an_alternative_by_set_replaces_the_one_in_the_file() -> None:
    stages = "traffic.arrivals.stages=[{rate: 1, duration_s: 5}]"
    arrivals = load_scenario("llama-3.1-8b-a100", [stages]).traffic.arrivals
    assert arrivals.rate is None
    assert len(arrivals.stages) == 1
