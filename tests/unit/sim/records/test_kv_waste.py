"""KV waste against a sum over steps of the slots that decoding requests hold and fill, without a closed form."""

from collections.abc import Callable
from math import ceil, log2

import numpy as np
import pytest

from perfmodel.cost.memory.groups import kv_groups
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.summary import kv_cache_waste
from perfmodel.specs import load_scenario

REQUESTS = ((1, 1), (7, 3), (16, 17), (33, 9), (100, 64), (130, 40), (300, 2))  # prompt, answer


def columns() -> RequestColumns:
    prompts, outputs = (np.array(column, dtype=np.int64) for column in zip(*REQUESTS, strict=True))
    seconds, counts = np.zeros(len(REQUESTS)), np.zeros(len(REQUESTS), dtype=np.int64)
    times = dict.fromkeys(("arrival_s", "first_scheduled_s", "first_token_s", "finished_s"), seconds)
    others = dict.fromkeys(("request_id", "num_cached_tokens", "num_preemptions", "replica"), counts)
    return RequestColumns(**times, **others, num_prompt_tokens=prompts, num_output_tokens=outputs)


def waste(*settings: str) -> float | None:
    return kv_cache_waste(load_scenario("llama-3.1-8b-a100", settings), columns())


def summed_waste(num_held: Callable[[int, int, int], float], num_filled: Callable[[int], float] = float) -> float:
    """`num_held` slots of (tokens in the cache, prompt, answer). The last sampled token is never cached."""
    steps = [(n, prompt, outputs) for prompt, outputs in REQUESTS for n in range(prompt, prompt + outputs)]
    return 1 - sum(num_filled(n) for n, _, _ in steps) / sum(num_held(*step) for step in steps)


@pytest.mark.parametrize("block", [1, 8, 16, 32])
def test_a_paged_sequence_wastes_the_rest_of_its_last_block(block: int) -> None:
    expected = summed_waste(lambda n, _p, _o: ceil(n / block) * block)
    assert waste(f"engine.block_size={block}") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("block", [8, 16])
def test_a_rolling_cache_holds_and_fills_no_more_than_its_window(block: int) -> None:
    """Every layer keeps the last 64 tokens, and overwrites older ones."""
    span = 64
    expected = summed_waste(lambda n, _p, _o: min(ceil(n / block), ceil(span / block)) * block, lambda n: min(n, span))
    assert waste(f"engine.block_size={block}", "model_changes={window: 64}") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("reserve", "tokens"),
    [
        ("false", lambda _p, _o: 512),
        ("true", lambda prompt, outputs: prompt + outputs - 1),
        ("pow2", lambda prompt, outputs: prompt + 2 ** ceil(log2(outputs)) - 1),
    ],
)
def test_a_reservation_is_held_from_the_first_step_to_the_last(reserve: str, tokens: Callable[[int, int], int]) -> None:
    """Kwon et al. 2023: reservations for the longest sequence, for the answer (an oracle), for its next power of 2."""
    wasted = waste("engine.kv_cache=contiguous", f"engine.reserve_output={reserve}", "engine.max_model_len=512")
    expected = summed_waste(lambda _n, prompt, outputs: ceil(tokens(prompt, outputs) / 16) * 16)
    assert wasted == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("model", "window"), [("tiny-gemma", 128), ("gemma-3-4b", 1024)])
def test_layer_groups_hold_their_window_and_one_more_row_in_blocks_of_the_largest(model: str, window: int) -> None:
    """In vLLM, a group keeps the whole sequence, or a window and the row it begins in. The last of gemma-3-4b's
    groups has four layers, the others have five."""
    settings = (f"model={model}", "engine.block_size=8", "engine.max_model_len=512")
    scenario = load_scenario("llama-3.1-8b-a100", settings)
    groups = kv_groups(scenario.model, scenario.hardware, scenario.engine)
    spans = [(group.num_layers, group.span) for group in groups]
    assert {span for _, span in spans} == {None, window}
    size = max(layers for layers, _ in spans)

    def held(n: int, _prompt: int, _outputs: int) -> float:
        rows = [ceil(n / 8) if span is None else min(ceil(n / 8), 1 + ceil((span - 1) / 8)) for _, span in spans]
        return 8 * size * sum(rows)

    def filled(n: int) -> float:
        return sum(layers * (n if span is None else min(n, span)) for layers, span in spans)

    assert kv_cache_waste(scenario, columns()) == pytest.approx(summed_waste(held, filled), abs=1e-12)


def test_recent_tokens_in_full_precision_have_their_own_buffers() -> None:
    """FP8 with the newest 32 tokens in BF16: they fill 32 more FP8 slots, held as two blocks of 16."""
    wasted = waste("engine.kv_cache_dtype=fp8", "engine.kv_cache_residual_tokens=32")
    expected = summed_waste(lambda n, _p, _o: ceil(n / 16) * 16 + 32, lambda n: n + min(n, 32))
    assert wasted == pytest.approx(expected, abs=1e-12)


def test_no_cache_has_no_waste() -> None:
    assert waste("engine.kv_cache=off") is None
