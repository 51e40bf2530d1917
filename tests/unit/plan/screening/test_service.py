"""A replica in closed form, against queues whose answers are known."""

from math import exp, factorial

import numpy as np
import pytest

from perfmodel.plan.screening.demand import NUM_TYPICAL, Demand
from perfmodel.plan.screening.service import Served, Service, serve
from perfmodel.plan.screening.surfaces import BATCHES, CHUNKS, StepSurface, Surfaces

STEP_S = 0.02


def engine(slots: float, per_prompt_token_s: float = 0.0, gates: float = 0.0, apart: bool = False) -> Service:
    """Decode steps of 20 ms whatever the batch; prompts cost in proportion to their tokens."""
    beside = np.full((5, len(CHUNKS)), STEP_S) + per_prompt_token_s * CHUNKS
    if apart:
        beside = np.tile(per_prompt_token_s * CHUNKS, (5, 1))
    ones = np.ones(len(BATCHES))
    surface = StepSurface(STEP_S * ones, ones, beside, np.zeros(len(CHUNKS)), 0.0, 0, "datasheet")

    def one(value: float) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([[value]])

    surfaces = Surfaces([surface], np.array([0]))
    none = (one(0.0), one(0.0), one(0.0))
    return Service(
        surfaces, surfaces, one(slots), one(8192.0), one(float(apart)), one(1.0), (one(0.0), one(0.0)), none, one(gates)
    )


def asks(prompt: float, outputs: float) -> Demand:
    """Requests that are all alike."""
    same = np.full(NUM_TYPICAL, prompt), np.zeros(NUM_TYPICAL), np.full(NUM_TYPICAL, outputs)
    return Demand(same[0], same[2], same, prompt + outputs / 2)


def at(service: Service, demand: Demand, rate: float) -> Served:
    return serve(service, demand, np.array([[rate]]))


def test_without_limits_the_batch_is_what_littles_law_says() -> None:
    """M/G/infinity: prompts for nothing, 200 tokens of 20 ms at 5 a second are 20 at once, and nobody waits."""
    served = at(engine(slots=2000), asks(1, 200), 5.0)
    assert served.batch[0, 0] == pytest.approx(5.0 * 200 * STEP_S)
    assert served.slot_wait[0, 0] == pytest.approx(0.0, abs=1e-9)
    assert np.allclose(served.tpot, STEP_S)


@pytest.mark.parametrize(("slots", "rate"), [(4, 0.8), (8, 1.8), (16, 3.6)])
def test_the_wait_for_a_slot_is_erlangs(slots: int, rate: float) -> None:
    """M/M/N with answers of 4 s: W = C(N, a) / (N / 4 - rate), C the Erlang C formula."""
    load = rate * 200 * STEP_S
    top = load**slots / factorial(slots) * slots / (slots - load)
    chance = top / (sum(load**k / factorial(k) for k in range(slots)) + top)
    served = at(engine(slots), asks(1, 200), rate)
    assert served.slot_wait[0, 0] == pytest.approx(chance / (slots / 4.0 - rate), rel=1e-6)


def test_a_rate_beyond_the_slots_is_never_served() -> None:
    served = at(engine(slots=4), asks(1, 200), 1.01)
    assert not served.is_stable[0, 0]
    assert np.isinf(served.ttft).all()


def test_prompts_take_their_share_of_the_time_from_decodes() -> None:
    """Steps without prompts take 20 ms, prompts 100 ms each, 2 a second: tokens come 1 / (1 - 0.2) times as slowly."""
    served = at(engine(slots=2000, per_prompt_token_s=1e-4), asks(1000, 400), 2.0)
    assert float(served.tpot.mean()) == pytest.approx(STEP_S / 0.8, rel=0.03)
    assert served.batch[0, 0] == pytest.approx(2.0 * 400 * STEP_S / 0.8, rel=0.03)


def test_prompts_on_engines_of_their_own_take_nothing() -> None:
    served = at(engine(slots=2000, per_prompt_token_s=1e-4, apart=True), asks(1000, 400), 2.0)
    assert np.allclose(served.tpot, STEP_S)


def test_prompts_beyond_what_full_steps_compute_are_never_served() -> None:
    """1,000 tokens at 0.1 ms and 8,192 of them in a step beside 20 ms: about 9.8 prompts a second at the very most."""
    demand = asks(1000, 2)
    assert at(engine(2000, 1e-4), demand, 9.0).is_stable[0, 0]
    assert not at(engine(2000, 1e-4), demand, 10.1).is_stable[0, 0]


def test_a_lone_request_waits_for_its_own_prompt_only() -> None:
    served = at(engine(slots=64, per_prompt_token_s=1e-4), asks(1000, 100), 1e-6)
    assert float(served.ttft.mean()) == pytest.approx(STEP_S + 0.1, rel=1e-3)


def test_waits_are_exponential_where_slots_are_taken() -> None:
    """Of M/M/1 with load 0.9: P(wait > t) = 0.9 exp(-0.1 t / s)."""
    served = at(engine(slots=1), asks(1, 50), 0.9)
    waits = served.ttft[0] - STEP_S
    for seconds in (5, 20):
        assert float((waits > seconds).mean()) == pytest.approx(0.9 * exp(-0.1 * seconds), abs=0.04)
