"""A `Scenario` means the same however it is made, and every function of the package takes one."""

import pytest

import perfmodel as pm
from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.models.cards import load_model
from perfmodel.specs import EngineSpec, Scenario, Traffic, load_hardware, load_scenario

FIELDS = {
    "engine": {"version": "0.31", "max_num_seqs": 64},
    "traffic": {
        "arrivals": {"process": "poisson", "rate": 2},
        "num_requests": 30,
        "input_tokens": {"distribution": "fixed", "value": 700},
        "output_tokens": {"distribution": "fixed", "value": 50},
    },
}


def made() -> Scenario:
    """Made in Python, of specs."""
    return Scenario(
        name="made",
        model=load_model("llama-3.1-8b"),
        hardware=load_hardware("h100-sxm-80gb"),
        engine=EngineSpec.model_validate(FIELDS["engine"]),
        traffic=Traffic.model_validate(FIELDS["traffic"]),
    )


@pytest.fixture
def loaded(tmp_path):
    """The same, from a file."""
    import yaml

    file = tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump({"model": "llama-3.1-8b", "hardware": "h100-sxm-80gb", **FIELDS}))
    return load_scenario(file)


def test_a_scenario_made_in_python_has_the_defaults_of_its_engine(loaded):
    """vLLM's server on an H100 takes 8,192 tokens a step and 0.92 of the memory, whoever asks."""
    assert made() == loaded
    assert (made().engine.max_num_batched_tokens, made().engine.gpu_memory_utilization) == (8192, 0.92)
    assert made().engine.model_fields_set == {"version", "max_num_seqs"}
    assert pm.simulate(made()).summary == pm.simulate(loaded).summary


def test_a_scenario_made_in_python_is_checked_as_its_engine_starts():
    with pytest.raises(UnsupportedError, match="tensor_parallel_size"):
        Scenario(
            name="odd",
            model=load_model("llama-3.1-8b"),
            hardware=load_hardware("h100-sxm-80gb"),
            engine=EngineSpec(tensor_parallel_size=5),
            traffic=Traffic.model_validate(FIELDS["traffic"]),
        )


@pytest.mark.parametrize("make", [made, "loaded"])
def test_overrides_change_a_scenario_as_they_change_a_file(make, loaded):
    scenario = loaded if make == "loaded" else make()
    changed = pm.simulate(scenario, {"traffic.num_requests": 10})
    assert changed.summary["completed"] == 10
    assert changed.summary == pm.simulate(scenario.with_({"traffic.num_requests": 10})).summary


def test_whatif_and_sweep_take_a_scenario(loaded):
    vary = {"engine.max_num_seqs": (8, 64)}
    by_scenario = pm.whatif(made(), vary, metrics=["mean_ttft_ms"], workers=1)
    assert str(by_scenario) == str(pm.whatif(loaded, vary, metrics=["mean_ttft_ms"], workers=1))
    points = pm.sweep(loaded, {"engine.max_num_seqs": [8, 64]}, metrics=["mean_ttft_ms"], workers=1)
    assert len(points.columns()["engine.max_num_seqs"]) == 2


def test_with_validates():
    with pytest.raises(SpecError, match=r"max_num_seqs.*-3"):
        made().with_({"engine.max_num_seqs": -3})
    with pytest.raises(SpecError, match="max_num_seq: unknown"):
        made().with_({"engine.max_num_seq": 3})


def test_a_scenario_that_no_text_says_cannot_be_changed():
    """A device that exists only here would be lost on the way to a worker process."""
    device = load_hardware("h100-sxm-80gb", ["hardware.hbm.bandwidth=2x"])
    with pytest.raises(SpecError, match="made in Python"):
        made().model_copy(update={"hardware": device}).with_({"engine.max_num_seqs": 3})


def test_a_copy_forgets_where_it_was_read(loaded):
    """Else the change would be undone when it is read again."""
    copy = loaded.model_copy(update={"seed": 7})
    assert copy.with_({"engine.max_num_seqs": 3}).seed == 7
