"""Unequal contexts: what their spread says, and that only kernels that do not balance them mind."""

import numpy as np
import pytest

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.ops import build_graph, decode_shape
from perfmodel.ops.ragged import ContextSpread
from perfmodel.specs import load_hardware, load_model


def test_the_longest_of_many_is_what_drawing_them_gives():
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(6, 1, 4000).astype(int) + 1
    spread = ContextSpread.of((int(prompt), 2) for prompt in prompts)
    assert spread is not None
    for n in (2, 8, 40):
        drawn = rng.choice(prompts, (4000, n)).max(axis=1).mean() / prompts.mean()
        assert spread.longest(n) == pytest.approx(drawn, rel=0.1)
    assert spread.longest(1) <= spread.longest(2) <= spread.longest(100)


def test_equal_prompts_differ_by_what_they_have_generated():
    spread = ContextSpread.of([(1000, 500)] * 10)
    assert spread is not None
    assert spread.longest(256) == pytest.approx(1500 / 1250, rel=0.05)
    assert ContextSpread.of([(7, 1)]) is None  # never decodes


@pytest.mark.parametrize(("device", "minds"), [("rtx-pro-6000", True), ("h100-sxm-80gb", False)])
def test_only_kernels_that_do_not_balance_contexts_mind(device, minds):
    hardware, model = load_hardware(device), load_model("llama-3.1-8b")
    calibration = load_calibration(hardware, "vllm")
    assert calibration.minds_ragged_batches is minds
    timer = OperatorTimer(hardware, calibration)
    shape, times = decode_shape(64, 700), []
    for factor in (None, 1.0, 4.0, 10.0):
        spread = None if factor is None else ContextSpread((factor,))
        graph = build_graph(model, spread=spread)
        node = next(node for node in graph.nodes if node.name == "attention_decode")
        times.append(timer.time(node.work(shape)).duration_s)
    assert times[0] == times[1]
    assert (times[1] <= times[2] < times[3]) if minds else (times[1] == times[2] == times[3])
    assert times[3] < 3 * times[0]
