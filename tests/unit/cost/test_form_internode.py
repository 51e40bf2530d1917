"""Messages between nodes against published figures, and against what they are within one node."""

import pytest
from devices import ONE_OF_EACH
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import Calibration, OperatorTimer, load_calibration
from perfmodel.cost.calibrations.for_all import load_exchange_fits
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.messages.collective import CollectiveFit, CustomAllReduceFit, exchange_time
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, send_recv
from perfmodel.ops.messages import Exchange, RankGroup, distinct_nodes, distinct_ranks
from perfmodel.specs.scenario_file import load_hardware

COLLECTIVES = [all_reduce, all_gather, reduce_scatter, all_to_all]


def timer(*overrides, device="h100-sxm-80gb", profile="vllm"):
    hardware = load_hardware(device, [f"hardware.network.{override}" for override in overrides])
    return OperatorTimer(hardware, load_calibration(hardware, profile))


NDR = timer("link=infiniband-ndr")
SLOW = timer("bandwidth_bytes_per_s=1e9", "latency_s=1e-3")


@given(st.sampled_from([*COLLECTIVES, send_recv]), st.floats(1, 1e10), st.sampled_from([2, 4, 8]))
def test_within_a_node_no_network_matters(collective, payload, num_ranks):
    if collective is send_recv:
        num_ranks = RankGroup("pipeline", 4, 2)
    work = collective(payload, num_ranks)
    assert NDR.time(work) == SLOW.time(work)


@pytest.mark.parametrize("num_nodes", [2, 4, 8, 16])
def test_large_all_reduces_reach_what_nccl_tests_report(num_nodes):
    """DGX H100 nodes with eight 400 Gbit/s cards each: bus bandwidths of 370 to 390 GB/s, 400 being the cards' rate."""
    payload, k = 8e9, 8 * num_nodes
    bus = 2 * payload * (k - 1) / k / NDR.time(all_reduce(payload, k)).duration_s
    assert bus == pytest.approx(380e9, rel=0.1)


# DeepEP README, low-latency kernels on H800 with 400 Gbit/s cards: 128 tokens of 7168 on each rank, 8 of 256 experts,
# FP8 with a scale for each 128 numbers out, BF16 back. Ranks: microseconds of dispatch and of combine.
LOW_LATENCY = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
# Normal kernels: 4096 tokens, 8 experts in 4 of 8 groups; GB/s of copies for nodes, the own one counted.
NORMAL = {16: (43, 43), 32: (58, 57), 64: (51, 50)}
H800 = OperatorTimer(
    load_hardware("h100-sxm-80gb", ["hardware.nvlink.bandwidth=200 GB/s", "hardware.network.link=infiniband-ndr"]),
    load_calibration(load_hardware("h100-sxm-80gb"), "vllm"),
)
OUT, BACK = ("dispatch", 1 + 4 / 128), ("combine", 2.0)


def exchange_us(ffn, num_ranks, tokens, kernel, element_bytes, route):
    one = tokens * 7168 * element_bytes
    to_ranks, group = one * distinct_ranks(ffn, num_ranks), RankGroup("expert", 1, 1, num_ranks)
    work = all_to_all(to_ranks, group, kernel, kernel, Exchange(ffn, one, route))
    return H800.time(work).duration_s * 1e6


@pytest.mark.parametrize("num_ranks", LOW_LATENCY)
@pytest.mark.parametrize("direction", [0, 1])
def test_low_latency_exchanges_take_what_deepep_reports(num_ranks, direction):
    """Within 15 %; fitted to other measurements of the same kernels, on 8 to 64 ranks."""
    ffn = MoEFFN(256, 8, 2048)
    predicted = exchange_us(ffn, num_ranks, 128, *(OUT, BACK)[direction], "expert")
    assert predicted == pytest.approx(LOW_LATENCY[num_ranks][direction], rel=0.15)


@pytest.mark.parametrize("num_ranks", NORMAL)
@pytest.mark.parametrize("direction", [0, 1])
def test_forwarded_exchanges_take_what_deepep_reports(num_ranks, direction):
    """Within 16 %; fitted to other measurements of the same kernels, on 8 to 32 ranks."""
    ffn = MoEFFN(256, 8, 2048, num_groups=8, top_k_groups=4)
    kernel, element_bytes = (OUT, BACK)[direction]
    moved = 4096 * 7168 * element_bytes * distinct_nodes(ffn, num_ranks // 8)
    published = moved / (NORMAL[num_ranks][direction] * 1e3)
    predicted = exchange_us(ffn, num_ranks, 4096, kernel, element_bytes, "node")
    assert predicted == pytest.approx(published, rel=0.16)


@pytest.mark.parametrize(("num_nodes", "tree_hops"), [(2, 2), (4, 4), (5, 6), (16, 8)])
def test_small_all_reduces_take_the_hops_of_nccls_table(num_nodes, tree_hops):
    """NCCL, src/graph/tuning.cc, in microseconds: a launch, 2 (M - 1) hops within and 2 log2 N (here rounded up) of 5.0
    between in a tree, 2 (k - N) within (1.0 at least) and 2 (N - 1) of 2.7 between in a ring."""
    fit = CollectiveFit(launch_s=7e-6, hop_s=8e-7)
    families = {"collective/all_reduce": fit}
    nccl = OperatorTimer(NDR.hardware, Calibration(device="h100", engine="test", families=families))
    tree = 7 + 14 * 1.0 + tree_hops * 5.0
    ring = 7 + 2 * 7 * num_nodes * 1.0 + 2 * (num_nodes - 1) * 2.7
    assert nccl.time(all_reduce(8.0, 8 * num_nodes)).duration_s == pytest.approx(min(tree, ring) * 1e-6, rel=1e-3)


def test_messages_between_nodes_are_less_sure():
    """Nobody timed them: as of any kernel without a table, 20 %, instead of the residuals within a node."""
    within, between = (NDR.fit(all_reduce(1e6, k)).residuals for k in (8, 16))
    assert within.num_rows > 0
    assert between == Residuals()


def test_engines_kernels_do_not_leave_a_node():
    """vLLM's custom all-reduce is off for groups on several nodes: NCCL's fit counts, whatever the own one says."""
    hardware = load_hardware("h100-sxm-80gb")
    nccl = CollectiveFit(launch_s=9e-6)
    times = [
        OperatorTimer(
            hardware, Calibration(device="h100", engine="test", families={"collective/all_reduce": fit})
        ).time(all_reduce(1e5, 16))
        for fit in (CustomAllReduceFit(beyond=nccl), CustomAllReduceFit(launch_s=5e-5, beyond=nccl), nccl)
    ]
    assert times[0] == times[1] == times[2]


@given(st.sampled_from(COLLECTIVES), st.floats(1, 1e10), st.integers(2, 40), st.sampled_from([2, 4, 8]))
@settings(max_examples=50)
def test_more_bytes_and_smaller_shares_of_cards_never_take_less(collective, payload, num_ranks, nics):
    some = timer(f"nics_per_node={nics}")
    one, two = (some.time(collective(size, num_ranks)).duration_s for size in (payload, 2 * payload))
    assert one <= two
    assert one >= timer("nics_per_node=8").time(collective(payload, num_ranks)).duration_s


@pytest.mark.parametrize("device", ONE_OF_EACH)
@pytest.mark.parametrize("profile", ["vllm", "sglang", "datasheet"])
def test_on_any_device_more_bytes_never_take_less_and_leaving_a_node_is_never_faster(device, profile):
    any_timer = timer(device=device, profile=profile)
    per_node = any_timer.device.devices_per_node
    for collective in COLLECTIVES:
        for num_ranks in (2, per_node, 2 * per_node) if per_node <= 1024 else (2, 64):
            times = [any_timer.time(collective(10.0**size, num_ranks)).duration_s for size in range(10)]
            assert times == sorted(times)
    if 1 < per_node <= 1024:
        for payload in (1e3, 1e6, 1e9):
            on_node, on_two = (any_timer.time(all_reduce(payload, k * per_node)).duration_s for k in (1, 2))
            assert on_node < 1.01 * on_two  # kernels differ: the engine's own on a node, NCCL's beyond


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_slow_network_takes_its_bytes_and_nothing_else(collective):
    """16 ranks on two nodes, 1 GB/s a card, of which 95 % are reached; bytes of a card as in the table of two_level."""
    share = {all_reduce: 1 / 8, all_gather: 15 / 16 / 8, reduce_scatter: 15 / 16 / 8, all_to_all: 1 / 2}[collective]
    slow = timer("bandwidth_bytes_per_s=1e9")
    assert slow.time(collective(1e9, 16)).duration_s == pytest.approx(1e9 * share / 0.95e9, rel=2e-3)


def test_only_the_send_that_crosses_is_slow():
    """Four stages of four on nodes of eight: 0 -> 1 and 2 -> 3 stay, 1 -> 2 does not; a step's mean is in between."""
    sends = [NDR.time(send_recv(1e6, RankGroup("pipeline", 4, 4, 1, stage))).duration_s for stage in range(3)]
    assert sends[0] == sends[2] < sends[1]
    assert sends[1] > 1e6 / 50e9
    mean = NDR.time(send_recv(1e6, RankGroup("pipeline", 4, 4))).duration_s
    assert mean == pytest.approx(sum(sends) / 3)


def test_an_exchange_takes_the_faster_route_where_none_is_named():
    """Few tokens go straight to their experts, many are sent once to each node; by the same kernels."""
    ffn, fit, group = MoEFFN(256, 8, 2048), load_exchange_fits().dispatch, RankGroup("expert", 1, 1, 64)
    for tokens, route in ((1, "expert"), (4096, "node")):
        one = tokens * 7168 * OUT[1]
        by_route = {
            name: exchange_time(
                all_to_all(one * distinct_ranks(ffn, 64), group, *OUT[:1], *OUT[:1], Exchange(ffn, one, name)),
                fit,
                H800.device,
            ).duration_s
            for name in ("expert", "node", None)
        }
        assert by_route[None] == by_route[route] == min(by_route.values())
