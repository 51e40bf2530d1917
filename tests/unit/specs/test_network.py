"""Networks between nodes: files, shares of cards, what a scenario says of them, and who is told what was assumed."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.catalog import find_file, list_names
from perfmodel.sim.records.result import network_notes
from perfmodel.specs.networks import DEFAULT_NETWORK, load_network
from perfmodel.specs.scenario_file import load_hardware, load_scenario

SCENARIO = "llama-3.1-70b-h100-tp4"
TP16 = "engine.tensor_parallel_size=16"


@pytest.mark.parametrize("name", list_names("networks"))
def test_a_network_is_as_fast_as_its_name_says(name):
    """Gbit/s in a name, or a generation of InfiniBand with four lanes of 50, 100 or 200 Gbit/s."""
    network, generation = load_network(name), name.rsplit("-", 1)[1]
    gbit_per_s = {"hdr": 4 * 50, "ndr": 4 * 100, "xdr": 4 * 200}.get(generation) or int(generation)
    assert network.bandwidth_bytes_per_s == pytest.approx(gbit_per_s / 8 * 1e9)
    assert network.source
    assert network.latency_source
    assert all(load_network(alias) == network for alias in network.aliases)


def test_devices_share_the_cards_of_their_node():
    """Four cards of 50 GB/s for eight devices; for four with one each."""
    halves = load_hardware("h100", ["hardware.network.link=ndr", "hardware.network.nics_per_node=4"])
    assert halves.network_link.bandwidth_bytes_per_s == pytest.approx(25e9)
    small = load_hardware("h100", ["hardware.network.devices_per_node=4", "hardware.network.nics_per_node=4"])
    assert small.devices_per_node == 4
    assert small.network_link.bandwidth_bytes_per_s == pytest.approx(50e9)
    assert load_hardware("gb200").devices_per_node == 72


def test_numbers_do_without_a_file():
    given = load_hardware("h100", ["hardware.network.bandwidth_bytes_per_s=20 GB/s"]).network_link
    assert (given.bandwidth_bytes_per_s, given.latency_s) == (20e9, 5e-6)
    other = load_hardware("h100", ["hardware.network.link=ndr", "hardware.network.latency_s=9 us"]).network_link
    assert (other.bandwidth_bytes_per_s, other.latency_s) == (50e9, pytest.approx(9e-6))
    assert other.name == "infiniband-ndr"


@pytest.mark.parametrize(("link", "card"), [("", 50e9), ("cluster.network.link=roce-100", 12.5e9)])
def test_what_a_named_network_says_can_be_multiplied(link, card):
    """The one that is assumed without a name as well."""
    overrides = [each for each in (link, "cluster.network.bandwidth_bytes_per_s=0.5x") if each]
    network = load_scenario(SCENARIO, overrides).hardware.network_link
    assert network.bandwidth_bytes_per_s == pytest.approx(0.5 * card)
    assert network.latency_s == 5e-6
    slower = load_scenario(SCENARIO, [*overrides, "cluster.network.latency_s=3x"]).hardware.network_link
    assert slower.latency_s == pytest.approx(15e-6)


def test_a_scenarios_network_is_that_of_all_its_hardware():
    name = "llama-3.1-70b-h100-disaggregated"
    scenario = load_scenario(name, ["cluster.network.link=roce-200", "cluster.pools.decode.hardware=h200-sxm"])
    assert {pool.hardware.network_link.name for pool in scenario.pools if pool.hardware} == {"roce-200"}
    assert scenario.hardware.network_link.name == "roce-200"
    assert all(scenario.of_pool(pool).hardware.network_link.name == "roce-200" for pool in scenario.pools)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cluster.network.link=carrier-pigeon", r"no link carrier-pigeon .*no network .*infiniband-ndr"),
        ("cluster.network.devices_per_node=9", r"devices_per_node=9; .*joins 8"),
        ("cluster.network.nics_per_node=0", "nics_per_node"),
    ],
)
def test_networks_that_cannot_be_are_refused(override, says):
    with pytest.raises(SpecError, match=says):
        load_scenario(SCENARIO, [override])


def test_what_was_assumed_is_said():
    assert not network_notes(load_scenario(SCENARIO))
    (note,) = network_notes(load_scenario(SCENARIO, [TP16]))
    assert all(each in note for each in (DEFAULT_NETWORK, "2 nodes of 8", "cluster.network"))
    assert not network_notes(load_scenario(SCENARIO, [TP16, "cluster.network.link=hdr"]))
    (small,) = network_notes(load_scenario(SCENARIO, ["cluster.network.devices_per_node=2"]))
    assert "2 nodes of 2" in small


def test_a_device_may_declare_its_own_link_between_nodes(tmp_path):
    """`scale_out` among the links of its file: nothing is assumed."""
    text = find_file("hardware", "h100-sxm-80gb").read_text(encoding="utf-8")
    own = "  links:\n    - {name: scale_out, bandwidth_bytes_per_s: 12e9, latency_s: 8e-6}\n"
    (tmp_path / "mine.yaml").write_text(text.replace("  links:\n", own), encoding="utf-8")
    scenario = load_scenario(SCENARIO, [TP16, f"hardware={tmp_path / 'mine.yaml'}"])
    assert scenario.hardware.network_link.bandwidth_bytes_per_s == 12e9
    assert not network_notes(scenario)


def test_kv_goes_over_a_named_network_as_well():
    scenario = load_scenario("llama-3.1-70b-h100-disaggregated", ["cluster.kv_transfer={link: infiniband-hdr}"])
    assert scenario.cluster.kv_transfer.link_of(scenario.hardware).bandwidth_bytes_per_s == 25e9


def test_kv_between_nodes_over_a_scale_up_link_is_told():
    """Engines of four and four fit on a node of eight; of four and eight they do not."""
    name, unsaid = "llama-3.1-70b-h100-disaggregated", "cluster.kv_transfer={}"
    assert not network_notes(load_scenario(name))
    assert not network_notes(load_scenario(name, [unsaid, "cluster.pools.decode.engine={tensor_parallel_size: 4}"]))
    (note,) = network_notes(load_scenario(name, [unsaid]))
    assert "nvlink, which joins 8 devices" in note
    assert "have 12" in note
