"""How far a device's L2 reaches: what fits is read from it, what is twice as large is not, and nothing in between
jumps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import Calibration, FamilyFit, OperatorTimer
from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.attention.decode import DecodeSizes, FlashDecodeFit, decode_seconds
from perfmodel.cost.kernel_models.attention.mixed import MixedAttentionFit, MixedSizes, mixed_seconds
from perfmodel.ops.problem_sizes import DecodeSize, HeadShape
from perfmodel.ops.work import Work
from perfmodel.specs import load_hardware

H100 = load_hardware("h100-sxm-80gb")
L2 = H100.level("l2")
assert L2 is not None
L2_BYTES = L2.capacity_bytes


def activations_s(num_bytes: float, speedup: float) -> float:
    families = {"elementwise": FamilyFit(cached_speedup=speedup)}
    timer = OperatorTimer(H100, Calibration(device="h100", engine="test", families=families))
    return timer.time(Work("x", "elementwise", activation_bytes=num_bytes)).memory_s


@pytest.mark.parametrize(("share", "hit"), [(0.01, 1.0), (0.7, 1.0), (1.05, 0.5), (1.4, 0.0), (5.0, 0.0)])
def test_activations_come_from_l2_up_to_seven_tenths_of_it(share: float, hit: float) -> None:
    """A kernel's operands share L2 with what else passes: 0.7 of it is theirs. From twice that on nothing is found."""
    num_bytes = share * L2_BYTES
    expected = num_bytes / H100.data_bandwidth * (1 - hit + hit / 4)
    assert activations_s(num_bytes, 4.0) == pytest.approx(expected)


@given(st.floats(1e3, 1e9), st.floats(1, 8))
def test_a_cache_is_never_slower_than_memory_nor_faster_than_itself(num_bytes: float, speedup: float) -> None:
    plain = num_bytes / H100.data_bandwidth
    assert plain / speedup * (1 - 1e-9) <= activations_s(num_bytes, speedup) <= plain * (1 + 1e-9)


@pytest.mark.parametrize(("share", "hit"), [(0.1, 1.0), (0.7, 1.0), (1.05, 0.5), (1.4, 0.0)])
def test_a_repeated_benchmark_finds_kv_in_as_much_of_l2(share: float, hit: float) -> None:
    """64 sequences whose KV makes up a share of L2, streamed by kernels that fill the machine and do little else."""
    fit = FlashDecodeFit(cache_speedup=2.0, knee=20.0, block_s=1e-8, block_bandwidth=10.0, group_traffic=1e-5)
    length = share * L2_BYTES / (64 * 4096)
    problem = DecodeSize(HeadShape(8.0, 8.0, 128.0, 128.0, 2.0), 64.0, 64.0 * length)
    sizes = DecodeSizes(problem, length, 4096.0, 0.0, 1.0)
    cold, warm = (decode_seconds(sizes, fit, DeviceFacts.of(H100), is_warm=warm).memory for warm in (False, True))
    assert float(warm / cold) == pytest.approx(1 - hit / 2)


@pytest.mark.parametrize(("share", "missed"), [(0.1, 0.0), (0.5, 0.0), (1.0, 0.5), (1.5, 1.0), (3.0, 1.0)])
def test_heads_of_a_group_read_kv_again_that_l2_has_lost(share: float, missed: float) -> None:
    """In one kernel with a prompt the 4 heads of a KV head are blocks far apart. What of the batch's KV of one head is
    beyond half of L2 has gone when the next head comes for it; from one and a half on nothing is left."""
    fit = MixedAttentionFit(reread=4.0, memory_fraction=1.0)
    length = share * L2_BYTES / (64 * 512)
    sizes = MixedSizes(HeadShape(32.0, 8.0, 128.0, 128.0, 2.0), 0.0, 0.0, 64.0, length, 8 * 512.0, 1.0)
    once = 64 * length * 8 * 512 / H100.data_bandwidth
    memory = float(mixed_seconds(sizes, fit, DeviceFacts.of(H100)).memory)
    assert memory == pytest.approx(once * (1 + 3 * missed))
