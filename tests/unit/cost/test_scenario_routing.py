"""The routing of a scenario: as it says, or as trained routers leave it."""

import pytest

from perfmodel.cost.calibrations.for_all import RoutingFit, load_routing_fit, routing_of
from perfmodel.files.fitted import save_fitted
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import slowest_uniform_routing
from perfmodel.specs import EngineSpec, ExpertRouting, load_scenario

BLOCK = MoEFFN(64, 6, 1408)


def scenario(profile="vllm", **routing):
    update = {"routing": ExpertRouting(**routing), "engine": EngineSpec(profile=profile)}
    return load_scenario("llama-3.1-8b-a100").model_copy(update=update)


def test_a_scenario_names_its_routing():
    for spec in ({}, {"distribution": "power_law", "alpha": 1.2}, {"distribution": "recorded", "popularity": [3, 1]}):
        assert routing_of(scenario(**spec))(BLOCK, 100, 4).assignments >= 100 * BLOCK.top_k / 4
    for wrong in (
        {"distribution": "power_law"},
        {"alpha": 1.0},
        {"distribution": "recorded", "popularity": [0, 0]},
        {"distribution": "uniform", "dispersion": 1.0},
    ):
        with pytest.raises(ValueError, match=r"alpha|popularity|dispersion"):
            ExpertRouting(**wrong)


def test_fitted_popularity_counts_unless_the_scenario_or_the_datasheet_says_otherwise():
    even = slowest_uniform_routing(BLOCK, 64, 1)
    fit = RoutingFit(dispersion=1.0)
    assert routing_of(scenario(), fit)(BLOCK, 64, 1).distinct < 0.95 * even.distinct
    assert routing_of(scenario(distribution="uniform"), fit)(BLOCK, 64, 1) == even
    assert routing_of(scenario(dispersion=0.0), fit)(BLOCK, 64, 1) == even
    assert routing_of(scenario("datasheet"), fit)(BLOCK, 64, 1) == even


def test_the_committed_fit_has_its_source_and_a_file_reads_back(tmp_path):
    fit = load_routing_fit()
    assert fit.source
    assert fit.command.endswith("--routing")
    assert RoutingFit.model_validate(fit.model_dump()) == fit
    written = save_fitted(fit, tmp_path / "calibrations" / "routing.yaml").read_text()
    assert written.startswith("# Written by")
    assert f"dispersion: {fit.dispersion}" in written


def test_finer_experts_are_more_unequal_and_eplb_balances_them():
    """With half as many experts of twice the load, the dispersion halves."""
    fit = RoutingFit(dispersion=0.5)
    assert [fit.among(count) for count in (64, 128, 256)] == [0.25, 0.5, 1.0]
    left, placed = (scenario(dispersion=1.0) for _ in range(2))
    placed = placed.model_copy(update={"engine": EngineSpec(enable_expert_parallel=True, enable_eplb=True)})
    most, evened = (routing_of(served)(BLOCK, 512, 8).assignments for served in (left, placed))
    assert 512 * BLOCK.top_k / 8 < evened < 0.9 * most
    assert routing_of(placed.model_copy(update={"routing": ExpertRouting()}), fit)(BLOCK, 512, 8).assignments < (
        routing_of(scenario(), fit)(BLOCK, 512, 8).assignments
    )
