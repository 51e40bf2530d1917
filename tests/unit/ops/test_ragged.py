"""Unequal contexts: what their spread says, and how much kernels mind that do not balance them, or not to the end."""

import numpy as np
import pytest

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.ops import build_graph, decode_shape
from perfmodel.ops.attention.decode import ContextSpread
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


def _seconds(device: str, batch: int, factors: tuple[float | None, ...]) -> list[float]:
    """Decode attention of a batch with a mean context of 700 whose longest is so many times as long."""
    hardware, model = load_hardware(device), load_model("llama-3.1-8b")
    calibration = load_calibration(hardware, "vllm")
    assert calibration.has_ragged_cost
    timer, times = OperatorTimer(hardware, calibration), []
    for factor in factors:
        graph = build_graph(model, spread=None if factor is None else ContextSpread((factor,)))
        node = next(node for node in graph.nodes if node.name == "attention_decode")
        times.append(timer.time(node.work(decode_shape(batch, 700))).duration_s)
    return times


def test_kernels_that_do_not_balance_contexts_mind():
    times = _seconds("rtx-pro-6000", 64, (None, 1.0, 4.0, 10.0))
    assert times[0] == times[1] <= times[2] < times[3]
    assert times[3] < 3 * times[0]


def test_persistent_kernels_that_cut_contexts_to_a_units_share_mind_less():
    """Two waves of whole contexts end with the longest; in many waves its end counts for little."""
    few, many = (_seconds("h100-sxm-80gb", batch, (None, 1.0, 1.4, 1.8)) for batch in (32, 256))
    for times in (few, many):
        assert times[0] == times[1] < times[2] < times[3] < 2 * times[0]
    assert few[3] / few[0] > many[3] / many[0]
