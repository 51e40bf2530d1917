"""Defaults by version, device and use, where a scenario gives none; what is given is left alone."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.sim import simulate
from perfmodel.specs import load_hardware, load_scenario, scenario_schema
from perfmodel.specs.engine.devices import VERSIONED_DEFAULTS, engine_notes, with_defaults
from perfmodel.specs.engine.spec import EngineSpec


# vllm/engine/arg_utils.py, EngineArgs.get_batch_defaults: max_num_batched_tokens and max_num_seqs of a server and of
# the LLM class; 70 GiB and more but for the A100, then all others; TPUs by chip, CPUs by rank.
@pytest.mark.parametrize(
    ("device", "server", "offline"),
    [
        ("h100-sxm-80gb", (8192, 1024), (16384, 1024)),
        ("mi300x", (8192, 1024), (16384, 1024)),
        ("rtx-pro-6000", (8192, 1024), (16384, 1024)),
        ("a100-sxm-80gb", (2048, 256), (8192, 256)),
        ("a100-pcie-80gb", (2048, 256), (8192, 256)),
        ("rtx-4090", (2048, 256), (8192, 256)),
        ("l40s", (2048, 256), (8192, 256)),
        ("tpu-v6e", (1024, 256), (2048, 256)),
        ("xeon-8480", (2048, 128), (4096, 256)),
    ],
)
def test_vllms_sizes_by_device_and_use(device, server, offline):
    hardware = load_hardware(device)
    for use, sizes in (("server", server), ("offline", offline)):
        engine = with_defaults(EngineSpec(), hardware, use)
        assert (engine.max_num_batched_tokens, engine.max_num_seqs) == sizes


def test_sizes_of_cpus_are_of_each_rank():
    engine = with_defaults(EngineSpec(tensor_parallel_size=2), load_hardware("xeon-8480"))
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (2 * 2048, 2 * 128)


def test_sequences_never_exceed_a_budget_that_is_given():
    engine = with_defaults(EngineSpec(max_num_batched_tokens=128), load_hardware("h100-sxm-80gb"))
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (128, 128)


def test_a_prompt_computed_at_once_fits_the_default_budget():
    """vLLM: without chunked prefill the default is at least max_model_len; one that is given stays."""
    whole = EngineSpec(enable_chunked_prefill=False, max_model_len=32768)
    device = load_hardware("a100-sxm-80gb")
    assert with_defaults(whole, device).max_num_batched_tokens == 32768
    given = whole.model_copy(update={"max_num_batched_tokens": 4096})
    assert with_defaults(given, device).max_num_batched_tokens == 4096


def test_what_is_given_is_left_alone_and_still_known_as_given():
    given = EngineSpec(max_num_seqs=7, gpu_memory_utilization=0.5)
    small = with_defaults(given, load_hardware("l40s"))
    assert (small.max_num_seqs, small.gpu_memory_utilization) == (7, 0.5)
    assert small.model_fields_set == given.model_fields_set
    # So another device has its own defaults, not those of the first.
    assert with_defaults(small, load_hardware("h200-sxm")).max_num_batched_tokens == 8192
    assert with_defaults(with_defaults(small, load_hardware("h200-sxm")), load_hardware("l40s")) == small


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ([], (2048, 256, 0.92)),
        (["hardware=h100-sxm-80gb"], (8192, 1024, 0.92)),
        (["engine.version=0.19.1", "hardware=h100-sxm-80gb"], (8192, 1024, 0.9)),
        (["engine.profile=trtllm"], (8192, 2048, 0.9)),
        (["traffic.arrivals={process: burst}"], (8192, 256, 0.92)),
    ],
)
def test_a_scenario_has_the_defaults_of_its_device_and_version(changes, sizes):
    engine = load_scenario("planning/chat-8b", changes).engine
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.gpu_memory_utilization) == sizes


def test_pools_have_the_defaults_of_their_own_devices():
    scenario = load_scenario(
        "planning/chat-8b", ["cluster.pools=[{role: prefill, hardware: h100-sxm-80gb}, {role: decode}]"]
    )
    assert [pool.engine.max_num_batched_tokens for pool in scenario.pools] == [8192, 2048]


def test_a_default_is_multiplied_as_it_is_on_the_device():
    assert load_scenario("planning/chat-8b", ["engine.max_num_seqs=2x"]).engine.max_num_seqs == 512
    on_h100 = load_scenario("planning/chat-8b", ["hardware=h100-sxm-80gb", "engine.max_num_seqs=0.5x"])
    assert on_h100.engine.max_num_seqs == 512


def test_more_sequences_than_the_default_budget_are_refused():
    with pytest.raises(SpecError, match=r"--set engine\.max_num_seqs=4096: .*=2048, the default of vllm .*=4096; give"):
        load_scenario("planning/chat-8b", ["engine.max_num_seqs=4096"])


def test_a_result_says_whose_defaults_it_took():
    scenario = load_scenario("planning/chat-8b", ["engine.version=0.21.0rc2", "traffic.num_requests=3"])
    taken, defaults = notes = engine_notes(scenario.engine)
    assert "0.21.0rc2" in taken
    assert defaults.startswith("Defaults of vllm 0.21: gpu_memory_utilization 0.92, ")
    assert "max_num_batched_tokens 2,048, max_num_seqs 256" in defaults
    assert set(notes) <= set(simulate(scenario).notes)


def test_defaults_of_two_pools_are_one_note_that_names_the_pool_of_what_differs():
    engine = load_scenario("planning/chat-8b", ["traffic.num_requests=3"]).engine
    smaller = load_scenario("planning/chat-8b", ["traffic.num_requests=3", "engine.max_num_seqs=64"]).engine
    (same,) = engine_notes(engine, engine, roles=("prefill", "decode"))
    assert same == engine_notes(engine)[0]
    (differs,) = engine_notes(engine, smaller, roles=("prefill", "decode"))
    assert differs == same.replace(
        f"max_num_seqs {engine.max_num_seqs:,}", f"max_num_seqs {engine.max_num_seqs:,} (prefill)"
    )


def test_nothing_is_said_of_what_was_given():
    given = {"gpu_memory_utilization": 0.9, "block_size": 16, "async_scheduling": True}
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    assert engine_notes(EngineSpec(**given, **sizes)) == ()


def test_the_scenarios_schema_promises_no_default_that_depends_on_the_device():
    fields = scenario_schema()["$defs"]["EngineSpec"]["properties"]
    assert "default" in fields["enforce_eager"]
    assert not [name for name in VERSIONED_DEFAULTS if "default" in fields[name]]
    assert "vllm" in fields["profile"]["examples"]
    assert {"type": "number"} in fields["version"]["anyOf"]  # `version: 0.19`, as people write it
