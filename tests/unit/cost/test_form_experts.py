"""Laws of the grouped experts form, on the loads that routing models give."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.experts import GroupedExpertsFit, expert_seconds, time_experts
from perfmodel.cost.kernel_models.experts import _sizes as sizes_of_work
from perfmodel.cost.kernel_models.fits import joined
from perfmodel.cost.kernel_models.gemm import TileStep
from perfmodel.cost.kernel_models.registry import time_work
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.feedforward import experts
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.routing import skewed_routing, slowest_uniform_routing, uniform_routing
from perfmodel.specs import ExpertRouting, load_hardware

DEVICES = [DeviceFacts.of(load_hardware(name)) for name in ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm")]
BLOCKS = [MoEFFN(8, 2, 14336), MoEFFN(128, 8, 768), MoEFFN(256, 8, 2048), MoEFFN(128, 6, 1856, gated=False)]
SLOW = DeviceFacts.of(load_hardware("h100-sxm-80gb"))
FAST = DeviceFacts.of(load_hardware("h100-sxm-80gb", ["hardware.hbm.bandwidth=6.7e12"]))
FORMATS = [LinearFormat("bf16", 2.0, 2.0, 2.0), LinearFormat("fp8", 1.0, 1.0, 2.0, True)]
ROUTINGS = [
    uniform_routing,
    slowest_uniform_routing,
    skewed_routing(ExpertRouting(distribution="power_law", alpha=1.2)),
]
FITS = [
    GroupedExpertsFit(),
    GroupedExpertsFit(compute_fraction=1, memory_fraction=1, launch_s=2e-6, tile_s=1e-8, passes=1, knee=20),
    GroupedExpertsFit(tile_rule=(TileStep(1, 16, 32), TileStep(0, 64, 64)), rule_counts="tokens_per_expert"),
    GroupedExpertsFit(moves_all_slots=True, misaligned=2.0),
]
TOKENS = st.integers(1, 20000)


def work_of(num_tokens, ffn, form, ranks=1, routing=uniform_routing, width=4096):
    load = routing(ffn, num_tokens, ranks)
    local = -(-ffn.num_experts // ranks)
    return experts(num_tokens, ffn, load, form, width=width, intermediate=ffn.intermediate_size, local_experts=local)


@settings(max_examples=200, deadline=None)
@given(
    TOKENS,
    st.sampled_from(BLOCKS),
    st.sampled_from(FORMATS),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(ROUTINGS),
    st.sampled_from(FITS),
    st.sampled_from(DEVICES),
)
def test_no_prediction_beats_the_declared_peaks(num_tokens, ffn, form, ranks, routing, fit, device):
    work = work_of(num_tokens, ffn, form, ranks, routing)
    time = time_experts(work, fit, device)
    assert time.duration_s >= work.flops / device.peak(work.rate) * (1 - 1e-9)
    assert time.duration_s >= work.weight_bytes / device.bandwidth * (1 - 1e-9)
    assert time.duration_s >= work.activation_bytes / device.bandwidth * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.sampled_from(BLOCKS), st.sampled_from(FORMATS), st.sampled_from(FITS))
def test_twice_the_bandwidth_is_never_slower(num_tokens, ffn, form, fit):
    work = work_of(num_tokens, ffn, form)
    before, after = (time_experts(work, fit, each).duration_s for each in (SLOW, FAST))
    assert before / 2 < after <= before


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.sampled_from(BLOCKS), st.sampled_from([*FITS[:2], FITS[3]]), st.sampled_from(DEVICES))
def test_twice_the_tokens_are_never_faster(num_tokens, ffn, fit, device):
    once, twice = (time_experts(work_of(n, ffn, FORMATS[0]), fit, device) for n in (num_tokens, 2 * num_tokens))
    assert twice.duration_s >= once.duration_s * (1 - 1e-6)


def test_one_at_a_time_is_as_many_at_once():
    works = [work_of(n, BLOCKS[1], FORMATS[1]) for n in (1, 7, 100, 5000)]
    together = joined([sizes_of_work(work) for work in works])
    for fit in FITS:
        many = expert_seconds(together, fit, DEVICES[1]).duration
        np.testing.assert_allclose(many, [time_experts(work, fit, DEVICES[1]).duration_s for work in works], rtol=1e-12)


def test_skew_costs_where_multiplying_does_and_spares_reads_where_it_does_not():
    """Skew overloads a rank with rows; with few tokens it hits fewer distinct experts instead."""
    for num_tokens, is_slower in ((16384, True), (128, False)):
        works = [work_of(num_tokens, BLOCKS[2], FORMATS[0], 8, routing) for routing in (uniform_routing, ROUTINGS[2])]
        even, skewed = (time_experts(work, FITS[0], DEVICES[1]).duration_s for work in works)
        assert (skewed > even) == is_slower


def test_nothing_to_do_takes_no_time():
    ffn = BLOCKS[0]
    none = experts(0, ffn, uniform_routing(ffn, 0, 1), FORMATS[0], width=4096, intermediate=ffn.intermediate_size)
    time = time_work(none, FITS[0], DEVICES[0])
    assert (time.duration_s, time.compute_s, time.memory_s, time.communication_s, time.overhead_s) == (0, 0, 0, 0, 0)


def test_misaligned_shards_cost_their_factor():
    device, fit = DEVICES[1], FITS[0]
    slower = fit.model_copy(update={"misaligned": 2.0})
    odd, even = (work_of(256, MoEFFN(128, 8, size), FORMATS[0]) for size in (769, 768))
    assert time_experts(odd, slower, device).duration_s > 1.4 * time_experts(odd, fit, device).duration_s
    assert time_experts(even, slower, device) == time_experts(even, fit, device)


def test_a_decode_step_of_mixtral_by_hand():
    """One token reads 2 experts of 3 x 4096 x 14336 in bf16: 704.6 MB, 210 us at 3.35 TB/s."""
    time = time_experts(work_of(1, BLOCKS[0], FORMATS[0]), GroupedExpertsFit(memory_fraction=1.0), DEVICES[1])
    assert time.bound == "memory"
    assert time.memory_s == pytest.approx(704.6e6 / 3.35e12, rel=2e-3)


def test_loads_without_tile_counts_are_taken_as_even():
    work = work_of(1024, BLOCKS[1], FORMATS[0])
    bare = replace(work, problem=work.problem._replace(tiles=()))
    known, even = (time_experts(each, FITS[0], DEVICES[1]).duration_s for each in (work, bare))
    assert even == pytest.approx(known, rel=0.3)


def test_kernels_that_move_all_slots_include_experts_of_other_ranks():
    """4 experts per token on 4 ranks, one per rank on average: three more rows per token."""
    ffn, moved = MoEFFN(64, 4, 768), GroupedExpertsFit(moves_all_slots=True)
    work = work_of(1000, ffn, FORMATS[0], ranks=4)
    gate_up, silu, down, combine = 4096 + 2 * 768, 3 * 768, 768 + 4096, 4096  # elements of a row, read and written
    row_bytes = 2 * (gate_up + silu + down + combine)
    more, own = (time_experts(work, fit, DEVICES[1]).duration_s for fit in (moved, GroupedExpertsFit()))
    assert more - own == pytest.approx(3000 * row_bytes * moved.passes / DEVICES[1].bandwidth, rel=1e-6)


@pytest.mark.parametrize("counts_local", [True, False])
def test_experts_are_counted_on_the_rank_or_in_the_model(counts_local):
    """1 us for each of 256, or of the 32 that one of eight ranks has, whatever else the kernels do."""
    fit = GroupedExpertsFit(counts_local_experts=counts_local, expert_s=1e-6)
    work = work_of(16, MoEFFN(256, 8, 2048), FORMATS[1], ranks=8)
    seconds = [time_experts(work, item, SLOW).duration_s for item in (fit, fit.model_copy(update={"expert_s": 0.0}))]
    assert seconds[0] - seconds[1] == pytest.approx((32 if counts_local else 256) * 1e-6)
