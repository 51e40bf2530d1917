"""The scheduler configuration of a scenario: engine arguments pass through, and rules apply to their engine only."""

import pytest

from perfmodel.engine import SchedulerConfig
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.replica.serving import scheduler_config
from perfmodel.specs import load_scenario


def config(*settings: str) -> SchedulerConfig:
    return scheduler_config(load_scenario("llama-3.1-8b-a100", settings))


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("engine.max_num_seqs=77", "max_num_seqs", 77),
        ("engine.max_num_batched_tokens=777", "max_num_batched_tokens", 777),
        ("engine.max_model_len=7777", "max_model_len", 7777),
        ("engine.block_size=32", "block_size", 32),
        ("engine.long_prefill_token_threshold=70", "long_prefill_token_threshold", 70),
        ("engine.scheduler_reserve_full_isl=false", "scheduler_reserve_full_isl", False),
        ("engine.scheduling_policy=priority", "scheduling_policy", "priority"),
        ("engine.pipeline_parallel_size=2", "pipeline_parallel_size", 2),
        ("engine.kv_cache=off", "keeps_kv", False),
    ],
)
def test_an_engine_argument_reaches_the_scheduler(setting: str, field: str, value: object) -> None:
    assert getattr(config(setting), field) == value


def test_batch_timeout_is_in_milliseconds() -> None:
    dynamic = config("engine.batching=dynamic", "engine.batch_timeout_ms=250")
    assert dynamic.batch_timeout == TICKS_PER_S // 4


def test_max_model_len_defaults_to_the_models_context() -> None:
    assert config("engine.max_model_len=null").max_model_len == 131_072


DRAFTS = "engine.speculative_config={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.5}}"


@pytest.mark.parametrize(
    ("settings", "has_estimates"),
    [
        ((), True),
        (("engine.pipeline_parallel_size=2",), False),
        ((DRAFTS,), False),
        (("engine.scheduling_policy=shortest-first",), False),
    ],
)
def test_only_sglang_with_one_plan_at_a_time_admits_by_estimates(
    settings: tuple[str, ...], has_estimates: bool
) -> None:
    assert (config("engine.profile=sglang", *settings).estimates is not None) is has_estimates
    assert config(*settings).estimates is None
