"""Money and energy of a run: what adds up to what, and who pays for which step."""

import pytest

from perfmodel.ops import BatchShape
from perfmodel.planning.points import run_metric
from perfmodel.sim import simulate
from perfmodel.sim.replica.backend import PromptTime
from perfmodel.specs import load_scenario

FEW = ["traffic.num_requests=40"]
DRAFTS = "engine.speculative_config={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.5}}"
SCENARIOS = [
    ("llama-3.1-8b-a100", []),
    ("llama-3.1-70b-h100-disaggregated", []),
    (
        "llama-3.1-8b-a100",
        ["engine.speculative_config={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.5}}"],
    ),
    ("llama-3.1-8b-a100", ["cluster.pools=[{share: 0.3}, {share: 0.7}]"]),
]


@pytest.fixture(scope="module", params=SCENARIOS, ids=["unified", "disaggregated", "speculating", "two-pools"])
def result(request):
    name, overrides = request.param
    return simulate(load_scenario(name, [*FEW, *overrides]))


def test_inputs_and_outputs_pay_the_whole_bill(result):
    found = result.summary
    inputs = found["usd_per_million_input_tokens_split"] * found["total_input_tokens"]
    outputs = found["usd_per_million_output_tokens_split"] * found["total_output_tokens"]
    assert inputs > 0
    assert outputs > 0
    assert (inputs + outputs) / 1e6 == pytest.approx(found["usd_total"], rel=1e-12)


def test_every_way_to_name_the_bill_is_the_same_bill(result):
    found = result.summary
    tokens = found["total_input_tokens"] + found["total_output_tokens"]
    bill = pytest.approx(found["usd_total"] * 1e6, rel=1e-12)
    assert found["usd_per_million_tokens"] * tokens == bill
    assert found["usd_per_million_output_tokens"] * found["total_output_tokens"] == bill
    price = result.scenario.hardware.price.usd_per_hour
    assert found["gpu_hours"] * price == pytest.approx(found["usd_total"], rel=1e-9)


def test_data_parallel_ranks_are_billed_for_their_own_devices():
    """Two ranks, each over two tensor-parallel devices, are four devices."""
    overrides = ["engine.data_parallel_size=2", "engine.tensor_parallel_size=2"]
    summary = simulate(load_scenario("llama-3.1-8b-a100", [*FEW, *overrides])).summary
    assert summary["gpu_hours"] * 3600 == pytest.approx(4 * summary["duration"])


def test_energy_is_power_times_time_over_all_pools(result):
    found, declared = result.summary, result.scenario.hardware.declared
    assert sum(found["energy_split_j"].values()) == pytest.approx(found["energy_j"])
    assert found["energy_split_j"]["idle"] >= declared.idle_w * found["gpu_hours"] * 3600 * (1 - 1e-9)
    assert min(found["energy_split_j"].values()) > 0
    assert found["energy_wh"] * 3600 == pytest.approx(found["energy_j"])
    assert found["joules_per_output_token"] * found["total_output_tokens"] == pytest.approx(found["energy_j"])
    assert found["mean_power_w"] * found["gpu_hours"] * 3600 == pytest.approx(found["energy_j"])
    assert declared.idle_w <= found["mean_power_w"] <= declared.tdp_w
    pools = found.get("pools", [])
    if pools:
        assert sum(pool["energy_j"] for pool in pools) == pytest.approx(found["energy_j"])
        of_time = sum(pool["mean_power_w"] * pool["num_devices"] * found["duration"] for pool in pools)
        assert of_time == pytest.approx(found["energy_j"])


def test_disaggregated_each_role_pays_for_its_own_pool():
    """Prompts are all that prefill replicas do, decodes all that the others do."""
    found = simulate(load_scenario("llama-3.1-70b-h100-disaggregated", FEW)).summary
    devices = {pool["role"]: pool["num_devices"] for pool in found["pools"]}
    of_prompts = found["usd_per_million_input_tokens_split"] * found["total_input_tokens"] / 1e6
    expected = devices["prefill"] / sum(devices.values())
    assert of_prompts / found["usd_total"] == pytest.approx(expected, rel=0.05)  # last chunk of one token: a decode


def test_answers_of_one_token_cost_nothing_but_their_prompts():
    one = [
        "traffic.output_tokens={distribution: fixed, value: 1}",
        "traffic.input_tokens={distribution: fixed, value: 500}",
    ]
    found = simulate(load_scenario("llama-3.1-8b-a100", [*FEW, *one])).summary
    assert found["usd_per_million_output_tokens_split"] == pytest.approx(0, abs=1e-9)


def test_longer_answers_move_the_bill_to_the_answers():
    shares = []
    for tokens in (20, 200):
        lengths = [f"traffic.output_tokens={{distribution: fixed, value: {tokens}}}"]
        found = simulate(load_scenario("llama-3.1-8b-a100", [*FEW, *lengths])).summary
        of_prompts = found["usd_per_million_input_tokens_split"] * found["total_input_tokens"] / 1e6
        shares.append(of_prompts / found["usd_total"])
    assert shares[0] > shares[1]


def test_leaps_and_single_steps_give_the_same_bill():
    scenario = load_scenario("llama-3.1-8b-a100", FEW)
    one, other = simulate(scenario).summary, simulate(scenario, can_leap=False).summary
    for name in ("usd_per_million_input_tokens_split", "usd_per_million_output_tokens_split", "mean_power_w"):
        assert one[name] == pytest.approx(other[name], rel=1e-9)


def test_without_a_price_there_is_energy_but_no_money():
    scenario = load_scenario("llama-3.1-8b-a100", FEW)
    hardware = scenario.hardware.model_copy(update={"price": None})
    found = simulate(scenario.model_copy(update={"hardware": hardware})).summary
    money = [name for name in found if name.startswith("usd_")]
    assert len(money) == 7
    assert all(found[name] is None for name in money)
    assert found["joules_per_output_token"] > 0


def test_servers_cooling_and_grid_are_factors_on_the_energy_of_devices():
    """1.3 x 1.2 of the devices' energy; a kilowatt-hour is 3.6 MJ."""
    site = ("site.server_factor=1.3", "site.pue=1.2", "site.gco2_per_kwh=400")
    alone, there = (simulate(load_scenario("llama-3.1-8b-a100", (*FEW, *more))).summary for more in ((), site))
    assert alone["site_joules_per_output_token"] is alone["gco2_per_million_output_tokens"] is None
    joules = alone["joules_per_output_token"]
    assert there["joules_per_output_token"] == joules
    assert there["site_joules_per_output_token"] == pytest.approx(1.56 * joules)
    assert there["gco2_per_million_output_tokens"] == pytest.approx(1.56 * joules * 1e6 / 3.6e6 * 400)


def test_a_shared_step_is_split_by_what_its_parts_take_apart():
    """Prompts alone 30, decodes alone 10, together 36 (weights are read once): three quarters are the prompts'."""
    time = PromptTime(lambda shape: (30, 10))
    assert time.share is None
    time.add(BatchShape(101, 1, ((100, 0),), 1, 50), 36)
    assert time.share == pytest.approx(27 / 36)
    time.add_decoding(18)
    assert time.share == pytest.approx(27 / 54)
    time.add(BatchShape(100, 0, ((100, 0),)), 46)
    assert time.share == pytest.approx(73 / 100)


@pytest.mark.parametrize("prompt", [33, 47, 100, 1000, 1023])
def test_parts_of_a_step_in_a_group_have_no_fewer_tokens_than_none(prompt):
    """One prompt and one decode on this rank, nothing on the others: apart, the group has the tokens of either."""
    seen = []
    time = PromptTime(lambda shape: (seen.append(shape.apart), (30, 10))[1])
    time.add(BatchShape(prompt + 1, 1, ((prompt, 0),), 1, 50, (), prompt + 1), 36)
    (prompts, decodes) = seen[0]
    assert (prompts.group_tokens, decodes.group_tokens) == (prompts.num_tokens, 1)


def test_what_a_device_does_is_over_those_that_were_there():
    """An autoscaled fleet of at most eight, at a load that two carry: per device-hour it does as much as two would."""
    scaling = "cluster.autoscaling={target: 20, min_replicas: 1, max_replicas: 8, interval_s: 5, cold_start_s: 1}"
    load = ["traffic.num_requests=400", "traffic.arrivals.rate=8"]
    scaled = simulate(load_scenario("llama-3.1-8b-a100", [*load, scaling]))
    found = scaled.summary
    devices = found["gpu_hours"] * 3600 / found["duration"]
    assert 1 < devices < 5 < scaled.scenario.num_devices
    assert found["mean_num_devices"] == pytest.approx(devices)
    assert found["output_throughput_per_gpu"] * devices == pytest.approx(found["output_throughput"])
    assert run_metric(scaled, "total_token_throughput_per_gpu") == pytest.approx(
        (found["total_input_tokens"] + found["total_output_tokens"]) / (3600 * found["gpu_hours"])
    )
    fixed = simulate(load_scenario("llama-3.1-8b-a100", [*load, "cluster.replicas=2"]))
    assert run_metric(fixed, "output_throughput_per_gpu") == pytest.approx(fixed.summary["output_throughput"] / 2)


def test_layers_split_over_two_devices_are_billed_as_two() -> None:
    """A token passes one device after the other: the bill doubles, the same work uses half of each."""
    few = ["engine={profile: llamacpp}", "traffic.num_requests=4", "traffic.arrivals.rate=1"]
    one, two = (
        simulate(load_scenario("llama-3.1-8b-a100", [*few, f"engine.layer_split={count}"])).summary for count in (1, 2)
    )
    assert two["mean_num_devices"] == pytest.approx(2)
    assert two["gpu_hours"] / two["duration"] == pytest.approx(2 * one["gpu_hours"] / one["duration"])
    assert two["mbu"] * two["duration"] == pytest.approx(one["mbu"] * one["duration"] / 2)
    assert 1 < two["energy_j"] / one["energy_j"] < 2
