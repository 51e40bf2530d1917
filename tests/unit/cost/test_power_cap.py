"""A device that may not draw what its work asks for: what slows down, by how much, and what does not."""

import pytest
from devices import ONE_OF_EACH
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import StepTables, load_calibration, step_costs
from perfmodel.cost.kernel_models.device import OperatorTime
from perfmodel.cost.power import Load, PowerCap, flop_energy
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario_file import load_hardware

PROMPT = BatchShape(1024, 1, ((1024, 0),))
SECONDS = st.floats(1e-6, 1e-2)


def capped(name, watts):
    return load_hardware(name, [f"hardware.power_cap_w={watts}"])


def operator(compute, memory, overhead=0.0):
    return OperatorTime(overhead + max(compute, memory), compute, memory, 0.0, overhead, "compute")


def power(hardware, time, compute_s, memory_s):
    """What a cap is compared with: in proportion to arithmetic, and half of it to streaming."""
    tdp, idle = hardware.declared.tdp_w, hardware.declared.idle_w or 0.15 * hardware.declared.tdp_w
    drawn = compute_s * flop_energy(time.clock) + 0.5 * memory_s
    return idle + (tdp - idle) * drawn / time.duration_s


def alone(hardware, time, compute_s, memory_s):
    return PowerCap.of(hardware).together([Load(time, compute_s, memory_s)])[0]


@given(st.sampled_from(ONE_OF_EACH), st.floats(0.3, 1.2), SECONDS, SECONDS, st.floats(0.3, 1), st.floats(0.3, 1))
def test_no_operator_draws_more_than_the_cap_and_none_gets_faster(name, share, compute, memory, of_peak, of_bandwidth):
    free = load_hardware(name)
    tdp = free.declared.tdp_w
    if tdp is None or share * tdp <= (free.declared.idle_w or 0.15 * tdp):
        return
    hardware, before = capped(name, share * tdp), operator(compute, memory)
    cap = PowerCap.of(hardware)
    assert (cap is None) == (share >= 1)
    if cap is not None:
        after = alone(hardware, before, of_peak * compute, of_bandwidth * memory)
        assert power(hardware, after, of_peak * compute, of_bandwidth * memory) <= share * tdp * (1 + 1e-6)
        assert after.duration_s >= before.duration_s
        assert (after.clock == 1.0) == (after is before)


def test_full_arithmetic_slows_by_the_cube_root_of_what_it_may_draw():
    """H100, 70 W idle, 700 W TDP, at 350 W: 280 of 630 W are left; power goes with the cube of the clock."""
    after = alone(capped("h100", 350), operator(1.0, 0.0), 1.0, 0.0)
    assert after.duration_s == pytest.approx((630 / 280) ** (1 / 3), rel=1e-5)


@pytest.mark.parametrize("watts", [285, 200, 100])
def test_below_the_floor_of_the_voltage_power_goes_with_the_clock(watts):
    """At 0.7 of the clock full arithmetic draws 0.343 of what it does; from there on in proportion to the clock."""
    after = alone(capped("h100", watts), operator(1.0, 0.0), 1.0, 0.0)
    assert after.clock == pytest.approx(0.7 * ((watts - 70) / 630) / 0.343, rel=1e-5)
    assert after.duration_s == pytest.approx(1 / after.clock)


def test_streams_slow_down_where_memory_alone_exceeds_the_cap():
    """Streaming at the peak draws 70 + 315 W of an H100. At 227.5 W, half of the 315, it takes twice as long."""
    after = alone(capped("h100", 227.5), operator(0.0, 1.0), 0.0, 1.0)
    assert after.duration_s == pytest.approx(2.0)
    assert after.bound == "memory"


def test_what_runs_between_products_runs_at_their_clock():
    """A product of 1 s and a message of 0.5 s, at 350 W: both take (630 / 280)^(1/3) times as long, but from another
    node the message comes as fast as ever. What draws little has little say in the clock."""
    slower = (630 / 280) ** (1 / 3)
    message = OperatorTime(0.5, 0.0, 0.0, 0.5, 0.0, "communication")
    product = Load(operator(1.0, 0.0), 1.0, 0.0)
    for is_remote in (False, True):
        loads = [product, Load(message, 0.0, 0.0, is_remote=is_remote)]
        times = PowerCap.of(capped("h100", 350)).together(loads)
        assert times[0].duration_s == pytest.approx(slower, rel=1e-5)
        assert times[1].duration_s == pytest.approx(0.5 if is_remote else 0.5 * slower, rel=1e-5)


def test_what_draws_no_more_than_the_cap_keeps_its_time_together_too():
    loads = [Load(operator(0.1, 1.0), 0.1, 0.6), Load(operator(0.0, 1e-6), 0.0, 1e-6, count=3)]
    assert PowerCap.of(capped("h100", 400)).together(loads) == [load.time for load in loads]


def test_what_waits_for_memory_loses_its_spare_clock_and_no_time():
    """Streaming at the peak draws 385 W of an H100; with a fifth of its arithmetic beside, 511."""
    after = alone(capped("h100", 450), operator(0.2, 1.0), 0.2, 1.0)
    assert after.duration_s == pytest.approx(1.0)
    assert 0.7 < after.clock < 1


def test_a_cap_of_tdp_is_none():
    free = step_costs(load_scenario("llama-3.1-8b-h100-2048-256")).estimate(PROMPT)
    at_tdp = step_costs(load_scenario("llama-3.1-8b-h100-2048-256", ["hardware.power_cap_w=700"])).estimate(PROMPT)
    assert at_tdp == free


def test_an_idle_device_can_not_be_capped_further():
    with pytest.raises(SpecError, match=r"power_cap_w=60.* idle \(70 W\).*700 W"):
        PowerCap.of(capped("h100", 60))


@pytest.fixture(scope="module")
def big_steps():
    """A prompt of 1024 tokens and a decode step at batch 1, on 8 H100s by their cap in watts."""
    name, tp8 = "llama-3.1-70b-h100-tp4", "engine.tensor_parallel_size=8"
    found = {}
    for watts in (700, 500, 400, 350):
        costs = step_costs(load_scenario(name, [tp8, f"hardware.power_cap_w={watts}"]))
        found[watts] = costs.estimate(PROMPT).duration_s, costs.estimate(decode_shape(1, 1024)).duration_s
    return found


def test_half_of_tdp_costs_prompts_time_and_tokens_none(big_steps):
    """Splitwise (Patel et al., ISCA 2024; its public traces of Llama-2-70B on 8 H100 at 350 of 700 W, prompts of 1024
    tokens): a token 29.8 -> 29.7 ms, a prompt 78 -> 101 ms. Ours has host time that no cap slows down."""
    (prompt, token), (slow_prompt, slow_token) = big_steps[700], big_steps[350]
    assert slow_token == pytest.approx(token, rel=0.01)
    assert slow_prompt / prompt == pytest.approx(101 / 78, rel=0.08)


def test_decoding_of_a_large_batch_under_a_cap():
    """From Words to Watts (Samsi et al., HPEC 2023): LLaMA-65B on four A100 of 80 GB, batches of 64, from 250 W to
    175 W 6.7 % longer. Ours: Llama-2-70B, the same but for its KV heads, on A100s of 300 W (PCIe)."""
    name, times = "llama-3.1-70b-h100-tp4", []
    for cap in (250, 175):
        like = ("model=llama-2-70b", "hardware=a100-pcie-80gb", "engine.max_model_len=4096")
        costs = step_costs(load_scenario(name, [*like, f"hardware.power_cap_w={cap}"]))
        times.append(costs.estimate(decode_shape(64, 512)).duration_s)
    assert times[1] / times[0] == pytest.approx(1.067, rel=0.03)


def test_a_step_is_estimated_and_simulated_alike():
    """`explain` times operators one by one, the simulator from tables: the same clocks for both."""
    costs = step_costs(load_scenario("llama-3.1-70b-h100-tp4", ["hardware.power_cap_w=350"]))
    estimate = costs.estimate(PROMPT)
    tables = StepTables(costs.graph, costs.timer)
    device = sum(tables.cost(group, group.key(PROMPT)).duration for group in tables.groups)
    assert device == pytest.approx(estimate.device_s * 1e12, rel=1e-6)


def test_prompts_take_longer_the_lower_the_cap(big_steps):
    prompts = [big_steps[watts][0] for watts in (700, 500, 400, 350)]
    assert prompts == sorted(prompts)
    assert prompts[0] < prompts[1]


def test_a_capped_run_takes_longer_and_its_devices_stay_under_the_cap():
    busy = ["traffic.num_requests=60", "traffic.arrivals.rate=40"]
    runs = {}
    for watts in (700, 450, 300):
        scenario = load_scenario("llama-3.1-8b-h100-2048-256", [*busy, f"hardware.power_cap_w={watts}"])
        runs[watts] = simulate(scenario).summary
        assert runs[watts]["mean_power_w"] <= watts
    assert runs[700]["duration"] < runs[450]["duration"] < runs[300]["duration"]
    assert runs[300]["energy_j"] < runs[700]["energy_j"]  # slower clocks take less for a FLOP, and this is busy


def test_prompts_under_a_cap_take_less_energy_but_no_less_than_the_lowest_voltage():
    """A prompt every two seconds keeps an H100 far below any cap on average, so what it draws beside its 70 W at rest
    is the work's own: less the lower the clock, at least 0.7^2 of what its arithmetic takes at full voltage."""
    lengths = ["traffic.input_tokens={distribution: fixed, value: 4000}", "traffic.output_tokens.value=2"]
    seldom = [*lengths, "traffic.num_requests=10", "traffic.arrivals={process: constant, rate: 0.5}"]
    works = []
    for watts in (700, 500, 350):
        found = simulate(
            load_scenario("llama-3.1-8b-h100-2048-256", [*seldom, f"hardware.power_cap_w={watts}"])
        ).summary
        works.append(found["energy_j"] - 70 * found["duration"])
    assert works == sorted(works, reverse=True)
    assert works[1] < 0.99 * works[0]
    assert 0.49 * works[0] < works[-1] < 0.8 * works[0]


def test_one_pool_may_be_capped_alone():
    """Splitwise's idea: decode replicas hardly need the power that prompts do."""
    few = ["traffic.num_requests=40"]
    name, cap = "llama-3.1-70b-h100-disaggregated", "cluster.pools.decode.hardware.power_cap_w=400"
    free, held = simulate(load_scenario(name, few)).summary, simulate(load_scenario(name, [*few, cap])).summary
    assert held["mean_ttft_ms"] == pytest.approx(free["mean_ttft_ms"], rel=0.01)
    assert held["mean_tpot_ms"] == pytest.approx(free["mean_tpot_ms"], rel=0.01)
    power = {pool["role"]: pool["mean_power_w"] for pool in held["pools"]}
    assert power["decode"] <= 400


def test_a_capped_device_keeps_its_calibration():
    """What was measured of it is as true under a cap."""
    assert load_calibration(capped("h100", 400)) == load_calibration(load_hardware("h100"))
