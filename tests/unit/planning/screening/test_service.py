"""A replica in closed form, against queues whose answers are known."""

from dataclasses import replace
from math import exp, factorial

import numpy as np
import pytest

from perfmodel.planning.screening.demand import NUM_TYPICAL, Demand
from perfmodel.planning.screening.service import Served, Service, serve
from perfmodel.planning.screening.surfaces import BATCHES, CHUNKS, StepSurface, Surfaces

STEP_S = 0.02


def engine(
    slots: float,
    per_prompt_token_s: float = 0.0,
    gates: float = 0.0,
    apart: bool = False,
    per_sequence_s: float = 0.0,
    transfer: tuple[float, float] = (0.0, 0.0),
    per_pair_s: float = 0.0,
    budget: float = 8192.0,
) -> Service:
    """Decode steps of 20 ms, and `per_sequence_s` for each of the batch; prompts cost in proportion to their tokens,
    and so does KV that another engine has computed, and each with what is in the cache before it (`per_pair_s`)."""
    beside = np.full((5, len(CHUNKS)), STEP_S) + per_prompt_token_s * CHUNKS
    if apart:
        beside = np.tile(per_prompt_token_s * CHUNKS, (5, 1))
    ones = np.ones(len(BATCHES))
    surface = StepSurface(
        STEP_S + per_sequence_s * BATCHES, ones, beside, per_pair_s * CHUNKS, 0.0, 0.0, 0, "datasheet"
    )

    def one(value: float) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([[value]])

    surfaces = Surfaces([surface], np.array([0]))
    none, kv = (one(0.0), one(0.0), one(0.0)), (one(transfer[0]), one(transfer[1]))
    return Service(surfaces, surfaces, one(slots), one(budget), one(float(apart)), one(1.0), kv, none, one(gates))


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


@pytest.mark.parametrize("life", [0.25, 1.0, 4.0, 16.0])
def test_an_answer_meets_the_mean_of_the_batches_of_its_life(life: float) -> None:
    """Batches of M/M/infinity are Poisson, and alike after t with the correlation exp(-t / mean life). Of 20 sequences
    the mean over a time has the variance 20 times the double integral of that over the time; the longer an answer, the
    less its TPOT tells of the moment when it came."""
    alike = np.linspace(0, life, 801)
    variance = 20 * np.exp(-np.abs(alike[:, None] - alike[None, :])).mean()
    demand = asks(1, 200)
    demand = replace(demand, typical=(*demand.typical[:2], np.full(NUM_TYPICAL, 200 * life)))
    served = at(engine(slots=2000, per_sequence_s=1e-7), demand, 5.0)
    assert float(served.tpot.std() / 1e-7) == pytest.approx(variance**0.5, rel=0.05)
    assert float(served.tpot.mean() - STEP_S) / 1e-7 == pytest.approx(20, rel=0.02)


@pytest.mark.parametrize("gates", [0, 1])
def test_kv_from_another_engine_waits_for_half_a_step_and_for_those_planned(gates: int) -> None:
    """It comes at any moment of a step of 20 ms, and its first token with the next step that is not planned yet: in
    the mean half a step, and a whole one for each that is."""
    service = engine(64, per_prompt_token_s=1e-4, gates=gates, apart=True, transfer=(0.003, 2e-6))
    served = at(service, asks(1000, 100), 1e-6)
    assert float(served.ttft.mean()) == pytest.approx(0.1 + 0.003 + 0.002 + (0.5 + gates) * STEP_S, rel=1e-3)


@pytest.mark.parametrize(("budget", "parts"), [(8193.0, 1), (1025.0, 1), (257.0, 4)])
def test_a_prompt_in_parts_attends_to_the_parts_before_and_to_what_is_cached(budget: float, parts: int) -> None:
    """1,024 tokens after 2,000 cached ones, each pair of a token and one before it 2 ns: all of the prompt sees what is
    cached, and a part what the parts before it left in the cache. (A decode beside takes one token of the budget.)"""
    demand = asks(1024, 100)
    demand = replace(demand, typical=(demand.typical[0], np.full(NUM_TYPICAL, 2000.0), demand.typical[2]))
    plain, attends = (
        at(engine(64, per_prompt_token_s=1e-4, budget=budget, per_pair_s=pair), demand, 1e-6) for pair in (0.0, 2e-9)
    )
    size = 1024 / parts
    pairs = 1024 * 2000 + sum(size * size * before for before in range(parts))
    assert float((attends.ttft - plain.ttft).mean()) == pytest.approx(2e-9 * pairs, rel=0.02)
