"""`fit_form`: what rows say is found whatever the prior; what they do not say stays where the form has it."""

import numpy as np
import pytest
from pydantic import Field

from perfmodel.evidence.fit.kernels import fit_form, residuals_of, widen_for_new_group
from perfmodel.files.base import Spec


class LineFit(Spec):
    """t = fixed + size x each, and at least a floor."""

    fixed_s: float = Field(default=1e-5, ge=1e-7, le=1e-2)
    each_s: float = Field(default=1e-7, ge=1e-10, le=1e-4)
    floor_s: float = Field(default=4e-6, ge=1e-7, le=1e-3)


FREE = ("fixed_s", "each_s", "floor_s")
SIZES = np.geomspace(1, 1e5, 40)
TRUE = LineFit(fixed_s=3e-4, each_s=2e-8, floor_s=1e-6)


def seconds(fit: LineFit, rows: np.ndarray) -> np.ndarray:
    return np.maximum(fit.floor_s, fit.fixed_s + SIZES[rows] * fit.each_s)


MEASURED = seconds(TRUE, np.arange(len(SIZES)))


@pytest.mark.parametrize("floor_s", [2e-7, 4e-6, 2e-4])
def test_a_parameter_that_no_row_determines_ends_at_its_prior_wherever_the_search_began(floor_s: float) -> None:
    """The floor is below all rows: any value up to 300 us explains them as well."""
    found = fit_form(seconds, LineFit(), MEASURED, free=FREE, starts=({"floor_s": floor_s},))
    assert found.floor_s == pytest.approx(LineFit().floor_s, rel=0.02)


def test_parameters_that_rows_determine_are_found_far_from_their_priors() -> None:
    found = fit_form(seconds, LineFit(), MEASURED, free=FREE)
    assert found.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.005)
    assert found.each_s == pytest.approx(TRUE.each_s, rel=0.01)


def test_a_prior_weighs_less_than_two_rows_that_disagree_with_it() -> None:
    few = np.array([0, len(SIZES) - 1])
    found = fit_form(lambda fit, rows: seconds(fit, few[rows]), LineFit(), MEASURED[few], free=("fixed_s", "each_s"))
    assert np.abs(np.log(seconds(found, few) / MEASURED[few])).max() < np.log(TRUE.fixed_s / LineFit().fixed_s) / 2


def test_residuals_are_logs_of_measured_over_predicted() -> None:
    """Ratios over 101 rows: a median of 1.2, a p10 of 0.9 and a p90 of 3."""
    measured = np.concatenate([np.full(11, 0.9), np.full(79, 1.2), np.full(11, 3.0)])
    residuals = residuals_of(np.full(101, 2.0), 2.0 * measured)
    assert (residuals.p10, residuals.p50, residuals.p90) == pytest.approx(tuple(np.log([0.9, 1.2, 3.0])), abs=1e-5)
    assert residuals_of(np.ones(101), measured, spread=2.0).p90 == pytest.approx(np.log(3.0) / 2, abs=1e-5)


@pytest.mark.parametrize("num_groups", [3, 6, 12])
def test_quantiles_of_few_groups_are_widened_to_cover_one_more(num_groups: int) -> None:
    """Rows of a group err alike: quantiles of many rows of few groups are those of few draws. Widened they hold four of
    five groups more, as they should, within what quantiles of few draws allow."""
    rng = np.random.default_rng(5)
    plain, widened = [], []
    for _ in range(3000):
        offsets = np.repeat(rng.normal(0, 0.1, num_groups), 10)
        found = residuals_of(np.exp(-offsets), np.ones(len(offsets)))
        more = rng.normal(0, 0.1)
        plain.append(found.p10 <= more <= found.p90)
        wide = widen_for_new_group(found, num_groups)
        widened.append(wide.p10 <= more <= wide.p90)
    assert np.mean(plain) < 0.78
    assert np.mean(plain) + 0.03 < np.mean(widened)
    assert 0.65 < np.mean(widened) < 0.85


def test_quantiles_of_many_groups_stay() -> None:
    found = residuals_of(np.exp(np.linspace(-0.1, 0.2, 50)), np.ones(50))
    assert widen_for_new_group(found, 10_000).p90 == pytest.approx(found.p90, rel=1e-2)
