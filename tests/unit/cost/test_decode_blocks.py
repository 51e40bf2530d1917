"""How many thread blocks flash decoding has, and how much of a device they fill."""

import pytest

from perfmodel.cost import Calibration, FamilyFit, OperatorTimer
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.prefill import Heads
from perfmodel.specs import load_hardware

CONTEXT = 200  # of one sequence: too short for a second split


@pytest.mark.parametrize(("group", "blocks"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_block_takes_64_query_heads_of_a_kv_head(group: int, blocks: int) -> None:
    """So many blocks of 108 compute units pull so many 108ths of the bandwidth for the keys and values."""
    device = load_hardware("a100-sxm-80gb")
    timer = OperatorTimer(device, Calibration(device="a100", engine="test", default=FamilyFit()))
    work = attention_decode(1, CONTEXT, Heads(group, 1, 128, 128, "bf16", 2, 2))
    seconds = work.kv_bytes / (device.data_bandwidth * blocks / 108) + work.activation_bytes / device.data_bandwidth
    assert timer.time(work).memory_s == pytest.approx(seconds)
