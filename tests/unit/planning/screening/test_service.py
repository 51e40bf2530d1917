"""A replica in closed form, against queues whose answers are known."""

from dataclasses import replace
from math import exp, factorial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfmodel.planning.screen import _binding, _service, goals_of
from perfmodel.planning.service import (
    NUM_TYPICAL,
    Demand,
    Served,
    Service,
    SingleTokens,
    _batch,
    _chain,
    _mean_steps,
    _prompt_work,
    held_steps,
    longest_gap,
    serve,
)
from perfmodel.planning.surfaces import BATCHES, CHUNKS, StepSurface, Surfaces
from perfmodel.specs import load_scenario
from perfmodel.specs.slo import SLO

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
    decodes: float = 1.0,
    brought: float = 1.0,
) -> Service:
    """Decode steps of 20 ms, and `per_sequence_s` for each of the batch; prompts cost in proportion to their tokens,
    and so does KV transferred from another engine; prompts also cost per pair of token and cached token (`per_pair_s`).
    A step produces `brought` tokens per sequence."""
    beside = np.full((5, len(CHUNKS)), STEP_S) + per_prompt_token_s * CHUNKS
    if apart:
        beside = np.tile(per_prompt_token_s * CHUNKS, (5, 1))
    ones = np.full(len(BATCHES), brought)
    surface = StepSurface(
        STEP_S + per_sequence_s * BATCHES, ones, beside, per_pair_s * CHUNKS, 0.0, 0.0, 0, "datasheet"
    )

    def one(value: float) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([[value]])

    surfaces = Surfaces([surface], np.array([0]))
    none, kv = (one(0.0), one(0.0), one(0.0)), (one(transfer[0]), one(transfer[1]))
    return Service(surfaces, surfaces, one(slots), one(budget), one(float(apart)), one(decodes), kv, none, one(gates))


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


def test_kv_cached_on_the_prefill_engine_is_transferred_too() -> None:
    """1,000 computed and 500 cached tokens take 2 us per token."""
    service, demand = engine(64, 1e-4, apart=True, transfer=(0.0, 2e-6)), asks(1000, 100)
    cached = replace(demand, typical=(demand.typical[0], np.full(NUM_TYPICAL, 500.0), demand.typical[2]))
    some, more = (float(at(service, prompts, 1e-6).ttft.mean()) for prompts in (demand, cached))
    assert more - some == pytest.approx(500 * 2e-6, rel=1e-3)


def test_decode_engines_share_the_requests_of_their_group() -> None:
    one, four = (at(engine(2000, decodes=count), asks(1, 200), 8.0) for count in (1.0, 4.0))
    assert float(one.batch[0, 0]) == pytest.approx(4 * float(four.batch[0, 0]))


def test_accepted_drafts_shorten_tpot_and_shrink_the_batch() -> None:
    """2.5 tokens in a step of 20 ms; shorter answers mean a smaller batch."""
    served = at(engine(2000, brought=2.5), asks(1, 200), 5.0)
    assert np.allclose(served.tpot, STEP_S / 2.5)
    assert served.batch[0, 0] == pytest.approx(5.0 * 200 * STEP_S / 2.5)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_the_wait_behind_other_prompts_is_pollaczek_khinchine(load: float) -> None:
    """Service times of 0.1 s: a residual of 0.05 s over 1 - load. Of 0.05 and 0.15 s: the mean square over twice the
    mean is 0.0625 s."""
    service, demand = engine(64, per_prompt_token_s=1e-4, apart=True), asks(1000, 100)
    equal = _prompt_work(service, demand, np.array([[10 * load]]), np.array([[0.0]]))
    assert equal.wait[0, 0] == pytest.approx(0.05 / (1 - load))
    lengths = np.where(np.arange(NUM_TYPICAL) % 2, 500.0, 1500.0)
    mixed = replace(demand, prompt=lengths, typical=(lengths, *demand.typical[1:]))
    assert _prompt_work(service, mixed, np.array([[10 * load]]), np.array([[0.0]])).wait[0, 0] == pytest.approx(
        0.0625 / (1 - load)
    )


def test_the_longest_gap_holds_the_largest_prompt_and_those_queued_behind_the_own() -> None:
    """A prompt of 1,000 tokens of 0.1 ms in a decode step of 20 ms; during a first step of 0.1 s, 0.2 prompts (200
    tokens) arrive at 2 requests/s. Without prompts the gap is a decode step; the token budget bounds a step."""

    def gap_s(rate: float, long: float = 0.0, budget: float = 8192.0) -> float:
        one = np.array([[1.0]])
        service, demand = engine(64, per_prompt_token_s=1e-4), asks(1000, 4000)
        gaps = longest_gap(
            service.surfaces, budget * one, demand, rate * one, 8 * one, STEP_S * one, long * np.ones((1, NUM_TYPICAL))
        )
        return float(np.median(gaps))

    assert gap_s(2.0) == pytest.approx(0.12)
    assert gap_s(2.0, long=0.1) == pytest.approx(0.14)
    assert gap_s(1e-9) == pytest.approx(STEP_S)
    assert gap_s(2.0, budget=508.0) == pytest.approx(0.07)


@pytest.mark.parametrize("met", [0.2, 1.0, 3.0])
def test_the_share_of_answers_without_a_held_step_is_poisson(met: float) -> None:
    """101 tokens are 100 steps of 20 ms after the first; with L prompts on average, exp(-L) of the answers meet
    none."""
    one = np.array([[1.0]])
    service, demand = engine(64, per_prompt_token_s=1e-4), asks(1000, 101)
    gaps = longest_gap(
        service.surfaces, 8192 * one, demand, met / 2.0 * one, 8 * one, STEP_S * one, 0 * np.ones((1, NUM_TYPICAL))
    )
    assert float((gaps < 1.1 * STEP_S).mean()) == pytest.approx(exp(-met), abs=0.03)


@pytest.mark.parametrize("arrived", [0.1, 0.7, 3.0])
def test_moments_of_steps_delayed_by_prompts(arrived: float) -> None:
    """Against draws: a Poisson number of prompts of 0.1 or 0.3 s in a step."""
    rng = np.random.default_rng(3)
    number = rng.poisson(arrived, 400_000)
    added = 0.1 * number + 0.2 * rng.binomial(number, 0.5)
    share, mean, square = held_steps(np.array(arrived), np.array(0.2), np.array(0.05))
    assert share == pytest.approx((number > 0).mean(), rel=0.01)
    assert mean == pytest.approx(added[number > 0].mean(), rel=0.01)
    assert square == pytest.approx((added[number > 0] ** 2).mean(), rel=0.01)


def test_a_faster_reader_waits_longer() -> None:
    """Against a random walk: a token gains 1 / speed - 20 ms of lead, and one step in 20 takes 0.2 s longer."""
    held = np.array([[0.05]]), np.array([[0.2]]), np.array([[0.05]])
    tokens = SingleTokens(np.array([[1.0]]), np.array([[0.02]]), held, np.array([[0.0]]))
    mean = {speed: float(tokens.reader_wait(speed).mean()) for speed in (2.0, 10.0, 20.0, 25.0)}
    assert list(mean.values()) == sorted(mean.values())
    rng = np.random.default_rng(4)
    steps = 0.02 + np.where(rng.random((4000, 1000)) < 0.05, rng.exponential(0.2, (4000, 1000)), 0.0)
    late = np.cumsum(steps - 1 / 20.0, axis=1).max(axis=1)
    assert mean[20.0] == pytest.approx(np.maximum(late, 0.0).mean(), rel=0.35)


def test_a_surface_is_interpolated_linearly() -> None:
    """Between the knots in both directions, and exact at a knot."""
    table = np.add.outer(np.arange(5.0), 10 * np.arange(len(CHUNKS)))
    ones = np.ones(len(BATCHES))
    surface = StepSurface(BATCHES * 1e-3, ones, table, np.zeros(len(CHUNKS)), 0.0, 0.0, 0, "datasheet")
    read = Surfaces([surface], np.array([0]))
    for column in (0, 2):
        between = CHUNKS[column] + 0.25 * (CHUNKS[column + 1] - CHUNKS[column])
        assert read.mixed_step_time(np.array([[0.0]]), np.array([[between]]))[0, 0] == pytest.approx(
            10 * (column + 0.25)
        )
    assert read.decode(np.array([[3.0]]))[0, 0] == pytest.approx(3e-3)


def test_slots_and_engine_counts_of_candidates() -> None:
    """Two prefill and three decode replicas of two ranks; slots are limited by the KV cache."""
    scenario = load_scenario("llama-3.1-8b-a100")
    layout = SimpleNamespace(
        scenario=scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"data_parallel_size": 2})}),
        kv_transfer=scenario.cluster.kv_transfer,
    )
    fields = {"layout": layout, "prefill_layout": layout, "prefill": None, "max_num_batched_tokens": 2048}
    fields |= {"encoders": None, "num_behind_encoders": 1}
    memory = SimpleNamespace(max_batch=lambda context: 100 if context == 1050 else 0)
    cases = [(64, (2, 3), 6, 64, 4), (256, (2, 3), 6, 100, 4), (256, None, 2, 100, 0)]
    candidates: Any = [
        SimpleNamespace(max_num_seqs=seqs, ratio=ratio, num_engines=engines, memory=memory, **fields)
        for seqs, ratio, engines, _, _ in cases
    ]
    surfaces = engine(64).surfaces
    service = _service(candidates, surfaces, surfaces, asks(1000, 100))
    assert service.slots[:, 0].tolist() == [slots for *_, slots, _ in cases]
    assert service.prefills[:, 0].tolist() == [prefills for *_, prefills in cases]
    assert service.decodes[:, 0].tolist() == [6, 6, 2]


def test_the_binding_limit_is_missed_most_relative_to_its_allowance() -> None:
    """A p99 limit that 3 in 100 requests miss is missed three times as often as allowed, a p90 limit that 20 in 100
    miss twice as often."""
    places = np.arange(NUM_TYPICAL) / NUM_TYPICAL
    ttft, tpot = (np.where(places < share, 2.0, 0.5)[None, :] for share in (0.03, 0.2))
    zero = np.zeros((1, 1))
    beyond = Served(ttft, tpot, zero, zero, np.ones((1, 1), dtype=bool))
    limit = np.ones((1, NUM_TYPICAL))
    goals: Any = [({"ttft": limit}, 0.99), ({"tpot": limit}, 0.9)]
    candidates: Any = [SimpleNamespace(max_num_seqs=64)]
    assert _binding(candidates, engine(64), beyond, asks(100, 50), goals) == ["ttft"]
    goals[0] = ({"ttft": limit}, 0.9)
    assert _binding(candidates, engine(64), beyond, asks(100, 50), goals) == ["tpot"]


@pytest.mark.parametrize("budget", [272.0, 300.0, 1000.0])
def test_prompts_get_the_token_budget_that_decodes_leave(budget: float) -> None:
    """Saturated with prompts of 1 ms a token: a step with b decodes takes 20 ms + (budget - b) ms."""
    steps = _mean_steps(engine(2000, 1e-3, budget=budget), asks(1000, 100), np.array([[1e4]]))
    assert steps[0] == pytest.approx(STEP_S + 1e-3 * np.maximum(budget - BATCHES, 1.0), rel=1e-6)


def test_delayed_decodes_widen_the_batch_and_the_wait_for_a_slot_alike() -> None:
    """A wait grows with the variance of the queue (Kingman 1961). Without delays it is the chain's."""
    service, demand, rate = engine(16, 1e-4), asks(1000, 200), np.array([[3.0]])
    chain = _chain(service, demand, rate, np.full((1, len(BATCHES)), STEP_S))
    work = _prompt_work(service, demand, rate, chain.mean)
    waits = []
    for share in (0.0, 0.3, 0.6):
        deviation, _, wait = _batch(service, chain, np.array([[share]]), work)
        assert wait / chain.wait == pytest.approx((deviation / chain.deviation) ** 2)
        waits.append(float(wait[0, 0]))
    assert waits[0] == float(chain.wait[0, 0]) > 0
    assert waits == sorted(set(waits))


def test_a_ttft_limit_per_input_token_counts_cached_tokens() -> None:
    """100 ms and 0.5 ms a token: 500 ms for 300 computed and 500 cached tokens, as for the requests of a run."""
    same = tuple(np.full(NUM_TYPICAL, float(tokens)) for tokens in (300, 500, 20))
    slo = SLO(ttft_ms=100, ttft_ms_per_input_token=0.5)
    ((limits, _),) = goals_of(slo, Demand(same[0], same[2], same, 310.0), 0.9)
    (limit,) = limits.values()
    assert list(limits) == ["ttft"]
    assert limit == pytest.approx(np.full((1, NUM_TYPICAL), 0.5))
    assert slo.ttft_limit_ms(800) == 500
