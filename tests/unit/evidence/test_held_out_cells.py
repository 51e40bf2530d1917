"""Fits that leave groups out, and fits for all engines: against what the data was made with."""

import numpy as np
import pytest

from perfmodel.cost import EngineProfile
from perfmodel.evidence.fit import profiles
from perfmodel.evidence.fit.parameters import LinearErrors, Parameter, fit_parameters, values_of
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.recorded import simulate_steady_states
from perfmodel.evidence.sources.steady import with_dispersion
from perfmodel.specs import Arrivals, EngineSpec, Lengths, Scenario, Traffic, load_hardware, load_model

PARAMETERS = [Parameter("host.serial_step_s", 1e-3, 1e-5, 1e-1), Parameter("server.in_s", 1e-2, 1e-4, 9e-2)]


def logs_of(profile):
    return np.log(values_of(profile, PARAMETERS))


def test_a_group_that_is_left_out_is_predicted_by_the_others():
    """Errors linear in the logarithms, the same in all groups but for one that is 0.4 off: leaving it out shows all of
    the 0.4, where a fit to everything would have taken some of it in."""
    truth, offsets = np.log([2e-3, 2e-2]), np.array([0.0, 0.0, 0.0, 0.0, 0.4, 0.4])
    slopes = np.array([[1, 0], [0, 1], [1, 1], [1, 0.5], [1, 0], [0, 1]], dtype=float)

    def errors(profile):
        return slopes @ (logs_of(profile) - truth) + offsets

    begin = EngineProfile(engine="vllm")
    best = fit_parameters(begin, PARAMETERS, errors)
    model = LinearErrors.around(begin, PARAMETERS, errors, logs_of(best))
    found = model.held_out(np.array(["a", "a", "b", "b", "odd", "odd"]))
    assert found[4:] == pytest.approx([0.4, 0.4], abs=0.03)
    assert (np.abs(errors(best)[4:]) < found[4:]).all()


def row(concurrency, tp):
    traffic = Traffic(
        arrivals=Arrivals(process="closed_loop", concurrency=concurrency),
        num_requests=3 * concurrency,
        input_tokens=Lengths(distribution="uniform", low=200, high=256),
        output_tokens=Lengths(distribution="uniform", low=50, high=64),
    )
    scenario = Scenario(
        name=f"{concurrency} on {tp}",
        model=load_model("qwen3-30b-a3b"),
        hardware=load_hardware("h100-sxm-80gb"),
        engine=EngineSpec(tensor_parallel_size=tp),
        traffic=traffic,
    )
    return Observation(scenario.name, scenario, {"tpot_mean": 1.0, "ttft_mean": 1.0})


def test_popularity_is_found_again_whatever_a_deployment_is_off_by():
    """Steps simulated under a dispersion of 0.6, those of one deployment 20 % longer: the fit finds 0.6."""
    rows = [row(concurrency, tp) for tp in (1, 2) for concurrency in (2, 8, 24, 64)]
    made = simulate_steady_states([with_dispersion(each, 0.6) for each in rows])
    off = {1: 1.0, 2: 1.2}
    measured = [
        Observation(
            pair.row.name,
            each.scenario,
            {
                "tpot_mean": pair.metrics["tpot_mean"] * off[each.scenario.engine.tensor_parallel_size],
                "ttft_mean": pair.metrics["ttft_mean"],
            },
        )
        for pair, each in zip(made, rows, strict=True)
    ]
    assert not any(pair.reason for pair in made)
    assert profiles.fit_popularity(measured).dispersion == pytest.approx(0.6, rel=0.15)
