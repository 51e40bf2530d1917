"""MIG slices: what NVIDIA's MIG user guide says a profile has, and what follows for a step of a model."""

import pytest

from perfmodel import load_scenario, simulate
from perfmodel.cost import plan_memory, step_costs
from perfmodel.errors import DoesNotFitError, SpecError
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.sim.fleet.kv_transfer import pcie_of_slices
from perfmodel.specs import load_hardware
from perfmodel.specs.scenario import price_in_use, price_lines

PROMPT = BatchShape(num_tokens=4096, num_samples=1, prefills=((4096, 0),))
WITH_PROFILES = ["a100-sxm-80gb", "a100-pcie-80gb", "h100-sxm-80gb", "h200-sxm"]


@pytest.mark.parametrize("name", WITH_PROFILES)
def test_no_set_of_equal_slices_is_more_than_the_gpu(name):
    """As many as seven compute and eight memory slices give: units and memory of all are at most the GPU's, and they
    are billed at most as one GPU."""
    whole = load_hardware(name)
    for profile, part in whole.declared.mig.items():
        count = min(7 // int(profile[0]), 8 // part.memory_slices)
        own = load_hardware(f"{name}:{profile}")
        assert count * own.declared.compute_units <= whole.declared.compute_units
        assert count * own.visible_memory_bytes <= whole.visible_memory_bytes * (1 + 1e-9)
        assert count * own.memory_bandwidth <= whole.memory_bandwidth * (1 + 1e-9)
        if whole.price is not None:
            assert count * own.price.usd_per_hour <= whole.price.usd_per_hour * (1 + 1e-9)


def test_a_slice_has_its_shares():
    """3g.40gb of an H100: 60 of 132 units, half of the memory, its bandwidth and L2, and no NVLink."""
    whole, part = load_hardware("h100"), load_hardware("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb")
    assert part.name == "h100-sxm-80gb:3g.40gb"
    assert part.declared.compute_units == 60
    assert part.declared.peak_flops_per_s["bf16"] == pytest.approx(989e12 * 60 / 132)
    assert part.memory_bandwidth == whole.memory_bandwidth / 2
    assert part.level("l2").capacity_bytes == whole.level("l2").capacity_bytes / 2
    assert part.level("sram") == whole.level("sram")
    assert part.visible_memory_bytes == 39.5 * 2**30
    assert [link.name for link in part.declared.links] == ["pcie"]


@pytest.mark.parametrize(("shape", "ratio"), [(decode_shape(64, 8000), 8 / 4), (PROMPT, 132 / 60)])
def test_steps_take_as_much_longer_as_the_slice_is_smaller(shape, ratio):
    """A decode of 64 long contexts is bound by memory, of which 3g.40gb has 4 of 8 slices, a prompt of 4,096 tokens
    by the tensor cores of 60 of 132 units (the roofline's two sides; launches do not change)."""
    seconds = []
    for hardware in ("h100", "h100:3g.40gb"):
        scenario = load_scenario("llama-3.1-8b-a100", (f"hardware={hardware}", "engine.profile=datasheet"))
        seconds.append(step_costs(scenario).cost_model().duration_ps(shape))
    assert seconds[1] / seconds[0] == pytest.approx(ratio, rel=0.07)


def test_a_model_that_does_not_fit_a_slice_is_refused():
    scenario = load_scenario("llama-3.1-8b-a100", ["hardware=h100:1g.10gb"])
    with pytest.raises(DoesNotFitError, match=r"1g\.10gb has 10\.0 GB.*Take a larger slice"):
        plan_memory(scenario.model, scenario.hardware, scenario.engine)


def test_slices_do_not_share_a_model():
    with pytest.raises(SpecError, match="slices of a GPU exchange nothing"):
        load_scenario("llama-3.1-8b-a100", ["hardware=h100:3g.40gb", "engine.tensor_parallel_size=2"])
    drafter = "method: draft_model, model: llama-3.2-1b, num_speculative_tokens: 3, acceptance: {rate: 0.7}"
    own = f"engine.speculative_config={{{drafter}, pipelined: true, has_own_device: true}}"
    with pytest.raises(SpecError, match="got 2 devices for an engine"):
        load_scenario("llama-3.1-8b-a100", ["hardware=h100:3g.40gb", own])


def test_two_models_on_one_gpu_are_pools_of_slices():
    """What each serves is what it serves alone; together they are billed as 1/2 and 4/7 of a GPU."""
    big = "{share: 0.5, hardware: h100:4g.40gb}"
    small = "{share: 0.5, hardware: h100:3g.40gb, model: llama-3.2-1b}"
    few = ("traffic.num_requests=60", "engine.max_model_len=4096")
    result = simulate(load_scenario("llama-3.1-8b-h100-2048-256", (f"cluster.pools=[{big}, {small}]", *few)))
    rows = result.summary["pools"]
    assert [row["hardware"] for row in rows] == ["h100-sxm-80gb:4g.40gb", "h100-sxm-80gb:3g.40gb"]
    assert rows[0]["usd_total"] / rows[1]["usd_total"] == pytest.approx((4 / 7) / (1 / 2), rel=1e-6)


@pytest.mark.parametrize("key", ["usd_per_gpu_hour", "owned.purchase_usd"])
def test_a_slice_costs_its_share_of_the_price_given_for_its_card(key):
    """3g.40gb has 3 of 7 compute and 4 of 8 memory slices, so half of a card at 4 USD; named itself it costs that."""

    def usd(given):
        changes = ["hardware=h100:3g.40gb", f"price.{key}={given}"]
        changes += ["price.owned.years=1", "site.usd_per_kwh=0.1"] if key.startswith("owned") else []
        scenario = load_scenario("llama-3.1-8b-a100", changes)
        owned, device = scenario.price.owned, scenario.hardware
        return price_in_use(device, scenario.price).usd_per_hour if owned is None else owned.usd_per_hour(device)

    assert usd("{h100: 4}") == usd(2)
    assert usd("{h100: 4, 'h100:3g.40gb': 3}") == usd(3)


def test_a_price_says_that_it_is_a_share():
    scenario = load_scenario("llama-3.1-8b-a100", ["hardware=h100:3g.40gb", "price.usd_per_gpu_hour={h100: 4}"])
    assert "2 USD per device hour of h100-sxm-80gb:3g.40gb" in price_lines(scenario)[0]
    assert "0.5 of h100-sxm-80gb" in price_lines(scenario)[0]


def test_slices_of_a_card_share_its_pcie_when_kv_moves():
    """Three prompts of equal length, computed at once on three slices, leave together: each transfer gets a third of
    the card's PCIe (here of 100 MB/s, beside which their prefills end at the same time), so takes three times as long
    as one alone. Seven 1g slices fill one card, 14 two."""

    def transfers(count, replicas=(3, 4), *more):
        pools = zip(("prefill", "decode"), replicas, strict=True)
        listed = ", ".join(f"{{role: {role}, replicas: {number}, hardware: h100:1g.10gb}}" for role, number in pools)
        changes = ["model=llama-3.2-1b", "engine.max_model_len=4096", f"cluster.pools=[{listed}]", *more]
        changes += (f"traffic.{name}_tokens={{distribution: fixed, value: 1024}}" for name in ("input", "output"))
        changes += (
            "traffic.arrivals={process: burst}",
            f"traffic.num_requests={count}",
            "cluster.kv_transfer.bandwidth_bytes_per_s=1e8",
        )
        result = simulate(load_scenario("llama-3.1-8b-a100", changes))
        return result.summary["kv_transfer"]["mean_ms"], " ".join(result.notes)

    (alone, notes), (together, _) = transfers(1), transfers(3)
    assert together == pytest.approx(3 * alone, rel=0.03)
    assert "PCIe of 1 card: at most 0.1 GB/s one way" in notes
    assert "PCIe of 2 cards: at most 0.2 GB/s" in transfers(1, (7, 7))[1]
    assert "PCIe" not in transfers(1, (3, 4), "cluster.kv_transfer.shared=true")[1]


@pytest.mark.parametrize(
    ("prefill", "decode", "cards"),
    [
        ("3 2g.20gb", "4 2g.20gb", 3),  # three to a card: a fourth has no compute slices
        ("1 4g.40gb", "2 4g.40gb", 3),  # one to a card
        ("1 4g.40gb", "1 3g.40gb", 1),
        ("1 3g.40gb", "4 1g.10gb", 1),  # 3 + 4 of seven, 4 + 4 of eight
        ("1 3g.40gb", "5 1g.10gb", 2),
        ("2 1g.20gb", "3 1g.20gb", 2),  # four to a card, by memory
    ],
)
def test_slices_are_packed_on_cards_by_compute_and_memory(prefill, decode, cards):
    """Seven compute and eight memory slices a card (NVIDIA MIG user guide); shares of them added up are too few."""
    sides = (("prefill", *prefill.split()), ("decode", *decode.split()))
    pools = ", ".join(f"{{role: {role}, replicas: {number}, hardware: 'h100:{part}'}}" for role, number, part in sides)
    changes = ["model=llama-3.2-1b", "engine.max_model_len=4096", f"cluster.pools=[{pools}]"]
    found = pcie_of_slices(load_scenario("llama-3.1-8b-a100", changes))
    assert found is not None
    assert found[0] == cards
