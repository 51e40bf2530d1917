"""Common draws: what devices share, and what a draw does to a rate beside the simulator under the same scores."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from perfmodel.cost.calibrations.draws import NUM_SCORES
from perfmodel.planning.finalist import Screened, seed_draws
from perfmodel.planning.runs import highest_on_lattice, lattice
from perfmodel.planning.screen import Screen
from perfmodel.planning.service import at_rate
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import NUM_DRAWS, drawn_surfaces, shared_scores
from perfmodel.planning.workers import Stepwise, spread
from perfmodel.sim.driver import _serve_drawn
from perfmodel.sim.fleet.pool import remembered_basis
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides

BASE = Base("llama-3.1-8b-a100")


def correlation(one: str, other: str) -> float:
    mine, its = (shared_scores(load_scenario(BASE.path, [f"hardware={name}"])) for name in (one, other))
    return float(np.corrcoef(mine.ravel(), its.ravel())[0, 1])


def test_devices_share_as_much_as_their_fits_do() -> None:
    """Devices that one fit was made to: all; a sibling that was not measured, whose interval is 1.5 times as wide by
    errors of its own: 1 / 1.5; else nothing."""
    assert correlation("h100-sxm-80gb", "h200-sxm") == pytest.approx(1.0)
    assert correlation("b200-sxm", "gb300") == pytest.approx(1 / 1.5, abs=0.06)
    assert correlation("a100-sxm-80gb", "h100-sxm-80gb") == pytest.approx(0.0, abs=0.1)


def test_a_renamed_device_has_the_same_scores() -> None:
    scenario = load_scenario(BASE.path, ["hardware=gb300"])
    renamed = scenario.model_copy(update={"hardware": scenario.hardware.model_copy(update={"name": "my-gb300"})})
    assert np.array_equal(shared_scores(scenario), shared_scores(renamed))


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h200-sxm"])
def test_scores_are_standard_normal_and_even(device: str) -> None:
    scores = shared_scores(load_scenario(BASE.path, [f"hardware={device}"]))
    assert scores.shape[0] == NUM_DRAWS
    assert scores.mean(axis=0) == pytest.approx(0.0, abs=1e-12)
    assert scores.std() == pytest.approx(1.0, abs=0.06)


def test_what_a_seed_does_to_all_alike_cancels() -> None:
    """Equal seeds have equal weights: a candidate that is 10 % better under each seed is better in each draw."""
    one = np.array([9.0, 10.0, 12.0])
    assert np.allclose(seed_draws(list(one)), seed_draws(list(1.1 * one)))


def screened() -> tuple[Screen, Screened]:
    space = {"tensor_parallel_size": (1,), "max_num_seqs": (128,), "max_num_batched_tokens": (2048,)}
    candidates = enumerate_space(BASE, PlanSpec.model_validate({"space": space})).candidates
    screen = Screen(candidates, BASE.load(), 0.9)
    (found,) = screen.all()
    return screen, found


def latencies_s(found: Screened, rate: float, scores: tuple[float, ...] | None, seed: int = 0) -> tuple[Any, Any]:
    """TTFT and TPOT of 400 requests under scores, simulated."""
    texts = (*found.candidate.overrides(1), *as_overrides({**at_rate(BASE.load(), rate, 400), "seed": seed}))
    requests = _serve_drawn(remembered_basis(None, None), 1, load_scenario(BASE.path, texts), scores)
    later = np.maximum(requests.num_output_tokens - 1, 1)
    return requests.ttft_s, (requests.e2el_s - requests.ttft_s) / later


@pytest.mark.release
@pytest.mark.parametrize("score", [(0.0, 1.0, 0.0, 0.0), (0.9, 0.9, 0.9, 0.9), (-0.9, -0.9, -0.9, -0.9)])
def test_the_simulator_agrees_about_what_a_draw_does_to_the_rate(
    score: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The highest rate under the scores over that without, within a tenth: 0.7 to 1.25 times."""
    screen, found = screened()
    slo = BASE.load().slo
    assert slo.ttft_ms is not None
    assert slo.tpot_ms is not None
    limits_s = slo.ttft_ms / 1e3, slo.tpot_ms / 1e3
    monkeypatch.setattr("perfmodel.planning.surfaces.shared_scores", lambda _: np.tile(np.array(score), (NUM_DRAWS, 1)))
    (drawn,) = screen.under_draws([found], [found.rate / 2])

    def highest(scores: tuple[float, ...] | None) -> float:
        def is_met(step: int) -> bool:
            ttft, tpot = latencies_s(found, 1.02**step, scores)
            return float(np.mean((ttft <= limits_s[0]) & (tpot <= limits_s[1]))) >= 0.9

        def asked(step: int) -> Generator[int, bool, bool]:
            return (yield step)

        search: Stepwise[int, int | None] = Stepwise(lambda start: highest_on_lattice(asked, start), is_met)
        (step,) = spread(search, [lattice(found.rate)], lambda *_: None, workers=1)
        assert step is not None
        return float(1.02**step)

    assert float(drawn.rate[0]) == pytest.approx(highest(score) / highest(None), rel=0.1)


@pytest.mark.parametrize("score", [(0.9, 0.9, 0.9, 0.9), (-0.9, -0.9, -0.9, -0.9), (1.0, -1.0, 1.0, -1.0)])
def test_the_simulator_agrees_about_what_a_draw_does_to_latencies(
    score: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 90th percentiles at 0.7 of the highest rate, over those without a draw, within 15 %."""
    screen, found = screened()
    monkeypatch.setattr("perfmodel.planning.surfaces.shared_scores", lambda _: np.tile(np.array(score), (NUM_DRAWS, 1)))
    rate = 0.7 * found.rate
    (drawn,) = screen.under_draws([found], [rate])
    under, plain = (
        np.mean([[np.quantile(each, 0.9) for each in latencies_s(found, rate, one, seed)] for seed in range(3)], axis=0)
        for one in (score, None)
    )
    for name, ratio in zip(("ttft", "tpot"), under / plain, strict=True):
        assert float(drawn.latencies[name][0]) == pytest.approx(float(ratio), rel=0.15)


def test_step_times_rise_with_scores_and_multiply() -> None:
    """At plus or minus one standard deviation of one score; the factors of two scores multiply."""
    ends = np.concatenate([np.zeros((1, NUM_SCORES)), np.eye(NUM_SCORES), -np.eye(NUM_SCORES)])
    both = ends[1:2] + ends[2:3]
    surfaces, _ = drawn_surfaces(BASE.load(), (1000.0, 500.0, 64, 2048, 0), np.concatenate([ends, both]), False)
    decode = np.array([surface.decode[:4] for surface in surfaces])
    centre, up, down = decode[0], decode[1 : NUM_SCORES + 1], decode[NUM_SCORES + 1 : -1]
    assert (up >= centre).all()
    assert (down <= centre).all()
    assert (up.max(axis=0) > 1.01 * centre).all()
    assert (down.min(axis=0) < 0.99 * centre).all()
    assert decode[-1] == pytest.approx(up[0] * up[1] / centre)
