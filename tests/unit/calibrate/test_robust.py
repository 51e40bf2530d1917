"""`fit_form`: what rows say is found whatever the prior; what they do not say stays where the form has it."""

import numpy as np
import pytest
from pydantic import Field

from perfmodel.calibrate.robust import fit_form
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
