"""Laws of the fit: it goes on until the errors are explained, and no further than is plausible."""

import numpy as np

from perfmodel.cost import EngineProfile
from perfmodel.evidence.fit.parameters import Parameter, fit_parameters

STEP = Parameter("host.serial_step_s", 3e-4, 2e-5, 3e-2)
IN = Parameter("server.in_s", 3e-3, 3e-4, 8e-2)
STEPS = np.array([1.0, 2.0, 4.0, 8.0, 40.0] * 8)  # of runs that pay the front end once


def means(profile):
    return STEPS * profile.host.serial_step_s + profile.server.in_s


def fitted(step_s, in_s):
    measured = means(EngineProfile(engine="test", host={"serial_step_s": step_s}, server={"in_s": in_s}))
    return fit_parameters(
        EngineProfile(engine="test"), (STEP, IN), lambda profile: np.log(means(profile) / measured)
    ), measured


def test_what_shows_in_the_means_is_found_however_far_from_the_beginning_it_is():
    for step_s, in_s in ((3e-4, 3e-3), (1e-2, 7e-2), (3e-5, 5e-2), (1e-2, 5e-3)):
        profile, measured = fitted(step_s, in_s)
        assert np.max(np.abs(means(profile) / measured - 1)) < 0.03


def test_what_is_not_plausible_is_not_found():
    profile, _ = fitted(3e-4, 0.1)
    assert IN.least <= profile.server.in_s <= IN.most
