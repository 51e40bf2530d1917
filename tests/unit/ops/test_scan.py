"""Recurrent mixers: counts by hand, and the laws they obey."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.models.architecture import GatedDeltaNet, Mamba
from perfmodel.models.cards import load_model
from perfmodel.ops import build_graph, decode_shape
from perfmodel.ops.recurrent import (
    chunked_delta_rule,
    chunked_ssd,
    conv_channels,
    selective_scan,
    state_shape,
    state_update,
)
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario_file import load_hardware

DELTA = GatedDeltaNet(16, 32, 128, 128, 4)  # Qwen3-Next
MAMBA2 = Mamba(128, 64, 128, 8, 4, chunk_size=256)
MAMBA1 = Mamba(8192, 1, 16, 1, 4, dt_rank=256)


def state(mixer, tp=1):
    return state_shape(mixer, tp, "bf16", 2.0)


@pytest.mark.parametrize(
    ("mixer", "inputs", "channels"),
    [
        (DELTA, 2 * 16 * 128 + 2 * 32 * 128, 32 * 128 + 2 * 16 * 128),  # q and k of 16 heads; v and the output of 32
        (MAMBA2, 2 * 128 * 64 + 2 * 8 * 128, 128 * 64 + 2 * 8 * 128),  # x and the output; B and C of 8 groups
        (MAMBA1, 2 * 8192 + 2 * 16, 8192),  # the convolution is of x alone
    ],
)
def test_a_scan_reads_and_writes_its_rows_and_the_convolution_has_their_channels(mixer, inputs, channels):
    assert state(mixer).inputs == inputs
    assert conv_channels(mixer, state(mixer)) == channels


def test_state_update_by_hand():
    """Qwen3-Next: 32 heads of 128 x 128 in fp32, read and written, 7 FLOPs each, per sequence."""
    work = state_update(3, state(DELTA))
    assert work.kv_bytes == 3 * 32 * 128 * 128 * 8
    assert work.flops == 3 * 32 * 128 * 128 * 7


def test_states_in_16_bits_move_half_the_bytes():
    """FlashInfer's kernel for states in bf16 takes 16 us where Triton's for fp32 takes 30: Qwen3.5-397B, 256 sequences
    on eight B200 with 8 heads of 128 x 128 each (pull request 19150 of sgl-project/sglang)."""
    model, hardware = load_model("qwen3.5-397b-a17b"), load_hardware("b200-sxm")
    seconds = []
    for form in ("auto", "bfloat16"):
        engine = EngineSpec(profile="sglang", tensor_parallel_size=8, mamba_ssm_cache_dtype=form)
        graph = build_graph(model, engine, sampling="greedy")
        work = next(node.work(decode_shape(256, 1000)) for node in graph.nodes if node.name == "state_update")
        assert work.kv_bytes == 2 * 256 * 8 * 128 * 128 * (4 if form == "auto" else 2)
        seconds.append(OperatorTimer(hardware, load_calibration(hardware, "sglang")).time(work).duration_s)
    assert seconds[1] / seconds[0] == pytest.approx(16 / 30, abs=0.06)


def test_prompts_store_their_final_states_in_the_state_format():
    """Between the chunks of a prompt, states stay in fp32."""
    whole, half = state(DELTA), state(replace(DELTA, state_format="bf16"))
    scans = [chunked_delta_rule([(640, 0)], scanned) for scanned in (whole, half)]
    assert scans[1].kv_bytes == scans[0].kv_bytes / 2 == 2 * 2 * whole.state_elements
    assert scans[1].activation_bytes == scans[0].activation_bytes


def test_chunked_ssd_by_hand():
    """Per token: 2 x 256 x (128 x 8 groups + 64 x 128 heads) + 4 x 128 x 64 x 128."""
    per_token = 2 * 256 * (128 * 8 + 64 * 128) + 4 * 128 * 64 * 128
    assert chunked_ssd([(1000, 0)], state(MAMBA2), 256).flops == 1000 * per_token


def test_chunked_delta_rule_by_hand():
    """Per token and head: 2 x 64 (3 x 128 + 2 x 128) + 64^2 + 6 x 128 x 128."""
    per_head = 2 * 64 * 5 * 128 + 64 * 64 + 6 * 128 * 128
    assert chunked_delta_rule([(640, 0)], state(DELTA)).flops == 640 * 32 * per_head


@pytest.mark.parametrize(
    ("work", "mixer", "chunks"),
    [
        (chunked_ssd([(1024, 0), (512, 0)], state(MAMBA2), 256), MAMBA2, 6),
        (chunked_delta_rule([(640, 0), (320, 0)], state(DELTA)), DELTA, 15),
        (selective_scan([(1000, 0), (500, 0)], state(MAMBA1)), MAMBA1, 0),  # in SRAM from the first token to the last
    ],
)
def test_chunks_and_prompts_read_and_write_states(work, mixer, chunks):
    """Two prompts. States between chunks are in fp32, rows in 16 bits."""
    state_bytes = 2 * state(mixer).state_elements * 4
    tokens = {MAMBA2: 1536, DELTA: 960, MAMBA1: 1500}[mixer]
    assert work.kv_bytes == 2 * state_bytes
    assert work.activation_bytes == tokens * state(mixer).inputs * 2 + chunks * state_bytes


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_scans_are_linear_in_tokens_and_blind_to_the_context(tokens, cached):
    for scan in (chunked_delta_rule, selective_scan):
        assert scan([(tokens, cached)], state(DELTA)) == scan([(tokens, 0)], state(DELTA))
        assert scan([(2 * tokens, 0)], state(DELTA)).flops == 2 * scan([(tokens, 0)], state(DELTA)).flops


@pytest.mark.parametrize("mixer", [DELTA, MAMBA2, MAMBA1])
def test_two_devices_hold_half_the_state_each(mixer):
    assert state(mixer, 2).state_elements * 2 == state(mixer).state_elements


def test_convolution_runs_over_the_inputs_of_the_scan():
    assert conv_channels(DELTA, state(DELTA)) == 2 * 16 * 128 + 32 * 128
    assert conv_channels(MAMBA2, state(MAMBA2)) == 128 * 64 + 2 * 8 * 128
    assert conv_channels(MAMBA1, state(MAMBA1)) == 8192


def test_nothing_to_scan_launches_nothing():
    assert chunked_ssd((), state(MAMBA2), 256).num_kernels == 0
    assert state_update(0, state(MAMBA2)).num_kernels == 0
