"""Collectives against the closed forms of their algorithms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.kernel_models.device import DEFAULT_LINK
from perfmodel.cost.kernel_models.messages.links import alpha_beta_time, link_for
from perfmodel.ops import Message
from perfmodel.specs.hardware import Link
from perfmodel.specs.networks import DEFAULT_NETWORK
from perfmodel.specs.scenario_file import load_hardware

NVLINK = Link(name="nvlink", bandwidth_bytes_per_s=300e9, latency_s=1e-6)
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


def time(kind, size, ranks):
    return alpha_beta_time(Message(kind, size, ranks), NVLINK)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_large_all_reduce_is_a_ring(ranks):
    """2 (k-1) steps of S/k bytes and one hop each."""
    assert time("all_reduce", 1e9, ranks) == pytest.approx(2 * (ranks - 1) * (1e-6 + 1e9 / ranks / 300e9), rel=1e-3)


@pytest.mark.parametrize("ranks", [4, 8])
def test_small_all_reduce_is_one_shot(ranks):
    """One hop, and every rank reads the k-1 others: 8 kB, not 2 (k-1) hops."""
    assert time("all_reduce", 8e3, ranks) == pytest.approx(1e-6 + (ranks - 1) * 8e3 / 300e9)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_gathers_and_scatters_move_all_but_the_own_part(kind):
    assert time(kind, 1e6, 8) == pytest.approx(1e-6 + 7 / 8 * 1e6 / 300e9)


def test_all_reduce_is_at_most_a_reduce_scatter_and_an_all_gather_by_ring():
    for size in (1e3, 1e6, 1e9):
        ring = 2 * 7 * (1e-6 + size / 8 / 300e9)
        assert time("all_reduce", size, 8) <= ring


def test_send_is_a_hop_and_the_wire():
    assert time("send_recv", 3e6, 2) == pytest.approx(1e-6 + 3e6 / 300e9)


@given(st.sampled_from(KINDS), st.floats(1, 1e10), st.sampled_from([2, 4, 8]))
def test_no_collective_beats_the_wire(kind, size, ranks):
    """At least S (k-1)/k bytes arrive at a rank in any of them."""
    assert time(kind, size, ranks) >= size * (ranks - 1) / ranks / 300e9
    assert time(kind, 2 * size, ranks) >= time(kind, size, ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_sends_nothing(kind):
    assert time(kind, 1e9, 1) == 0


def test_links_by_the_number_of_ranks():
    h100 = load_hardware("h100-sxm-80gb")
    assert link_for(h100, 8).name == "nvlink"
    assert link_for(h100, 16).name == DEFAULT_NETWORK  # beyond the scale-up domain, and no scale-out link is declared
    assert link_for(load_hardware("l40s"), 2).name == "pcie"
    assert link_for(load_hardware("cpu"), 2) is DEFAULT_LINK


def test_links_without_a_declared_latency_have_one():
    bare = Link(name="nvlink", bandwidth_bytes_per_s=300e9)
    assert alpha_beta_time(Message("send_recv", 1, 2), bare) >= 1e-6
