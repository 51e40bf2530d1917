"""Collective forms: no message beats the link, more bytes and more ranks never take less, floats equal arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import Calibration, OperatorTimer, load_calibration
from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.messages.collective import (
    CollectiveFit,
    CollectiveSizes,
    CustomAllReduceFit,
    collective_seconds,
    collective_time,
    custom_seconds,
    custom_time,
    over_link,
)
from perfmodel.cost.kernel_models.messages.links import link_for
from perfmodel.ops.collectives import all_gather, all_reduce
from perfmodel.specs.scenario_file import load_hardware

DEVICES = [DeviceFacts.of(load_hardware(name)) for name in ("a100-sxm-80gb", "h100-sxm-80gb", "rtx-4090", "l40s")]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
BEST = CollectiveFit(
    launch_s=1e-6,
    hop_s=1e-8,
    first_channel=0.3,
    ramp_s=1e-8,
    low_latency_fraction=0.8,
    simple_start_s=1e-8,
    simple_fraction=1.0,
    memory_touches=1.0,
)
kinds, devices, ranks = st.sampled_from(KINDS), st.sampled_from(DEVICES), st.integers(2, 8)
payloads = st.floats(1, 2e9)


@given(kinds, payloads, ranks, devices)
def test_nothing_is_faster_than_its_bytes_on_the_link(kind, payload, num_ranks, device):
    link = link_for(device.hardware, num_ranks)
    sizes = CollectiveSizes.of(kind, payload, num_ranks)
    assert float(collective_seconds(sizes, BEST, device, link).duration) >= sizes.wire / link.bandwidth_bytes_per_s


@given(payloads, ranks, devices)
def test_a_custom_all_reduce_is_not_faster_than_its_bytes_either(payload, num_ranks, device):
    fit = CustomAllReduceFit(
        launch_s=5e-7, peer_s=1e-9, one_shot_fraction=1.0, two_shot_fraction=1.0, sync_s=1e-8, beyond=BEST
    )
    link = link_for(device.hardware, num_ranks)
    sizes = CollectiveSizes.of("all_reduce", payload, num_ranks)
    assert float(custom_seconds(sizes, fit, device, link).duration) >= sizes.wire / link.bandwidth_bytes_per_s


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_one_shot_all_reduce_reads_the_buffers_of_all_peers(num_ranks):
    """8 kB at half of the link bandwidth; the synchronization of a two-shot all-reduce takes longer."""
    device = DEVICES[1]
    fit = CustomAllReduceFit(launch_s=1e-6, peer_s=1e-9, one_shot_fraction=0.5, sync_s=2e-5)
    time = custom_seconds(CollectiveSizes.of("all_reduce", 8e3, num_ranks), fit, device, device.link)
    seconds = (num_ranks - 1) * (8e3 / (0.5 * device.link_bandwidth) + 1e-9)
    assert float(time.duration) == pytest.approx(1e-6 + seconds, rel=1e-6)


@given(kinds, payloads, st.floats(1, 1e9), ranks, devices)
def test_more_bytes_never_take_less(kind, payload, more, num_ranks, device):
    link = link_for(device.hardware, num_ranks)
    times = [
        float(collective_seconds(CollectiveSizes.of(kind, size, num_ranks), CollectiveFit(), device, link).duration)
        for size in (payload, payload + more)
    ]
    assert times[0] <= times[1]


@given(st.sampled_from(KINDS[:3]), payloads, st.integers(2, 7), devices)
def test_more_ranks_never_take_less(kind, payload, num_ranks, device):
    link = link_for(device.hardware, num_ranks)
    times = [
        float(collective_seconds(CollectiveSizes.of(kind, payload, k), CollectiveFit(), device, link).duration)
        for k in (num_ranks, num_ranks + 1)
    ]
    assert times[0] <= times[1]


@given(payloads, ranks, devices)
def test_floats_equal_arrays(payload, num_ranks, device):
    link = link_for(device.hardware, num_ranks)
    sizes = CollectiveSizes.of("all_reduce", np.full(2, payload), np.full(2, float(num_ranks)), np.ones(2))
    work = all_reduce(payload, num_ranks)
    for fit, one, many in (
        (CollectiveFit(switch_ranks=4), collective_time, collective_seconds),
        (CustomAllReduceFit(), custom_time, custom_seconds),
    ):
        seconds = many(sizes, fit, device, link).duration
        assert seconds == pytest.approx([one(work, fit, device).duration_s] * 2)


def test_a_switch_that_adds_saves_wire():
    """8 ranks: 9/8 instead of 14/8 of the payload; integers, small messages and few ranks stay on the ring."""
    device = DEVICES[1]
    link = link_for(device.hardware, 8)
    with_switch, without = CollectiveFit(switch_ranks=8), CollectiveFit()

    def seconds(fit, payload, num_ranks, switched=1.0):
        sizes = CollectiveSizes.of("all_reduce", payload, num_ranks, switched)
        return float(collective_seconds(sizes, fit, device, link).duration)

    saved = seconds(without, 1e9, 8) - seconds(with_switch, 1e9, 8)
    assert saved == pytest.approx((14 - 9) / 8 * 1e9 / (with_switch.simple_fraction * link.bandwidth_bytes_per_s))
    assert seconds(with_switch, 1e9, 8, switched=0.0) == seconds(without, 1e9, 8)
    assert seconds(with_switch, 1e6, 8) == seconds(without, 1e6, 8)
    assert seconds(with_switch, 1e9, 4) == seconds(without, 1e9, 4)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_that_share_a_path_have_half_the_rate_with_each_doubling(num_ranks):
    """Of a send each rank has the whole payload on the wire, of a one-shot all-reduce that of each other rank."""
    device, shared = DEVICES[3], {"left_per_doubling": 0.5}
    link, slower = link_for(device.hardware, 2), num_ranks / 2
    send, small = CollectiveSizes.of("send_recv", 1e8, num_ranks), CollectiveSizes.of("all_reduce", 1e3, num_ranks)
    alone, together = (collective_seconds(send, CollectiveFit(**some), device, link) for some in ({}, shared))
    assert together.wire == pytest.approx(slower * alone.wire)
    assert together.duration - alone.duration == pytest.approx(float((slower - 1) * alone.wire))
    own = (custom_seconds(small, CustomAllReduceFit(**some), device, link).wire for some in ({}, shared))
    assert float(next(own)) * slower == pytest.approx(float(next(own)))


def test_one_rank_talks_to_nobody():
    device = DEVICES[0]
    link = link_for(device.hardware, 2)
    assert (
        float(collective_seconds(CollectiveSizes.of("all_reduce", 1e6, 1), CollectiveFit(), device, link).duration) == 0
    )
    assert collective_time(all_reduce(1e6, 1), CollectiveFit(), device).duration_s == 0


def test_a_fit_for_nvlink_says_something_about_pcie():
    """Hops scale with the declared latency (1.0 and 0.6 us), the wire with the declared bandwidth."""
    fit = CollectiveFit(link_latency_s=0.6e-6)
    nvlink, pcie = DEVICES[0], DEVICES[2]
    small = [collective_time(all_reduce(1, 2), fit, device).duration_s for device in (nvlink, pcie)]
    assert small[1] - small[0] == pytest.approx(2 * fit.hop_s * (1.0 / 0.6 - 1), rel=0.05)
    large = [collective_time(all_reduce(1e9, 2), fit, device).duration_s for device in (nvlink, pcie)]
    assert large[1] / large[0] == pytest.approx(300 / 31.5, rel=0.25)


def test_the_timer_finds_the_fit_of_each_kind():
    """The engine's own all-reduce where there is one, NCCL's fits for the rest."""
    families = {
        "collective/all_reduce": CustomAllReduceFit(),
        "collective/all_reduce/nccl": CollectiveFit(),
        "collective/all_gather/nccl": CollectiveFit(launch_s=2e-5),
    }
    timer = OperatorTimer(DEVICES[0].hardware, Calibration(device="a100", engine="test", families=families))
    assert (
        timer.time(all_reduce(1e4, 2)).duration_s
        == custom_time(all_reduce(1e4, 2), CustomAllReduceFit(), DEVICES[0]).duration_s
    )
    assert timer.time(all_gather(1e4, 2)).duration_s > 2e-5


# NCCL's all-gather between two RTX PRO 6000 over PCIe 5.0 x16: bytes that each rank sends, microseconds.
# Source: flashinfer-ai/flashinfer pull request 5023 (rows of 4096 bfloat16 numbers, its NCCL baseline).
NCCL_OVER_PCIE = {
    8192: 8.31,
    65536: 12.47,
    131072: 16.67,
    524288: 31.62,
    1048576: 46.57,
    2097152: 76.03,
    4194304: 135.3,
}


@pytest.mark.parametrize("sent", NCCL_OVER_PCIE)
def test_a_fit_to_other_tables_says_what_nccl_takes_over_pcie(sent):
    hardware = load_hardware("rtx-pro-6000")
    predicted = OperatorTimer(hardware, load_calibration(hardware, "vllm")).time(all_gather(2 * sent, 2)).duration_s
    assert predicted == pytest.approx(NCCL_OVER_PCIE[sent] * 1e-6, rel=0.25)


def test_engines_own_kernels_serve_two_ranks_over_pcie_and_nccl_serves_more():
    """vLLM's custom_all_reduce.py: more than two devices need NVLink between all of them."""
    hardware = load_hardware("h100-sxm-80gb")
    nvlink, pcie = hardware.link("nvlink"), hardware.link("pcie")
    device, fit = DeviceFacts.of(hardware), CustomAllReduceFit()
    over = over_link(fit, nvlink, pcie)
    assert over_link(fit, nvlink, nvlink) == fit
    for ranks, is_own in ((2, True), (4, False)):
        sizes = CollectiveSizes.of("all_reduce", 1e5, ranks)
        nccl = float(collective_seconds(sizes, over.beyond, device, pcie).duration)
        assert (float(custom_seconds(sizes, over, device, pcie).duration) < 0.8 * nccl) == is_own


# All-reduces between four V100 behind one PCIe switch, in a CUDA graph: bytes, microseconds by NCCL.
# Source: haohervchb/sglang-V100 pull request 2.
NCCL_BETWEEN_FOUR = {4096: 19.4, 8192: 20.3, 16384: 22.3, 32768: 24.2}


@pytest.mark.parametrize("payload", NCCL_BETWEEN_FOUR)
def test_devices_that_nobody_measured_exchange_over_pcie_hop_by_hop(payload):
    hardware = load_hardware("v100-pcie-32gb")
    predicted = OperatorTimer(hardware, load_calibration(hardware, "vllm")).time(all_reduce(payload, 4)).duration_s
    assert predicted == pytest.approx(NCCL_BETWEEN_FOUR[payload] * 1e-6, rel=0.15)


def _all_reduce_s(device: str, *, payload: float, ranks: int = 2, direct: bool | None = None) -> float:
    hardware = load_hardware(device)
    if direct is not None:
        links = tuple(
            link.model_copy(update={"peer_to_peer": direct}) if link.name == "pcie" else link
            for link in hardware.declared.links
        )
        hardware = hardware.model_copy(update={"declared": hardware.declared.model_copy(update={"links": links})})
    return OperatorTimer(hardware, load_calibration(hardware, "vllm")).time(all_reduce(payload, ranks)).duration_s


@pytest.mark.parametrize("device", ["rtx-4090", "rtx-5090", "gtx-1080"])
def test_what_goes_through_the_hosts_memory_takes_longer(device):
    """Two RTX 5090 decoded 1.29 times as fast with a driver that lets them see each other's memory: 1.0 ms of a step of
    some 80 messages (noonghunna/club-3090 issue 873)."""
    for payload in (8192.0, 1e6, 1e8):
        assert _all_reduce_s(device, payload=payload, direct=False) > _all_reduce_s(
            device, payload=payload, direct=True
        )


def test_a_hop_through_the_hosts_memory_costs_what_two_cards_showed():
    lost = _all_reduce_s("rtx-5090", payload=4096, direct=False) - _all_reduce_s("rtx-5090", payload=4096, direct=True)
    assert lost == pytest.approx(1.0e-3 / 80, rel=0.35)
