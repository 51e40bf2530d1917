"""`Draw`: one plausible set of factors on what the model takes times to be, for ensembles of simulations.

What a calibration leaves unexplained is not noise that averages out over a run: kernels of one shape err alike in
every step. A draw is such a state of affairs, as factors (log-normal, by scores in standard deviations):

    kernels   a factor per operator family, sigma = COMMON * spread * (p90 - p10) / 2.563 of its fit's residuals
    step      every step, device and host: what whole runs under the engine left unexplained
    prompt    what prompts add to a step, device and host: what is left of the residuals of TTFT beyond those of steps
    server    the front end's times

`spread` is the calibration's: how far its fits have come. Fits without residuals, engines without recorded runs and
the datasheet have assumed spreads, below.
"""

__all__ = ["NUM_SCORES", "Draw", "LogNormal", "Scores", "Uncertainty"]

from dataclasses import dataclass
from math import exp

from perfmodel.cost.calibration import Calibration
from perfmodel.cost.forms.residuals import Residuals
from perfmodel.cost.server import EngineProfile, ServerFit

Scores = tuple[float, ...]  # standard deviations: of steps, prompts, the server, and of groups of operator families

_STEP, _PROMPT, _SERVER, _OTHERS = 0, 1, 2, 7
_FAMILIES = {"gemm": 3, "attention_decode": 4, "attention_mixed": 4, "attention_prefill": 5, "moe": 6}
NUM_SCORES = 8

# The part of a kernel's residual that all its calls in a run have in common. Residuals are over all shapes of a table;
# a run has few, near each other, some too fast and some too slow.
COMMON = 0.3
_P10_TO_P90 = 2.563  # of a standard normal


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(centre + sigma * score)"""

    centre: float = 0.0
    sigma: float = 0.0

    def at(self, score: float) -> float:
        return exp(self.centre + self.sigma * score)

    @classmethod
    def of(cls, residuals: Residuals, widened: float = 1.0) -> "LogNormal":
        return cls(residuals.p50, widened * (residuals.p90 - residuals.p10) / _P10_TO_P90)


# Operators that nobody timed, in a calibration (elementwise kernels at an assumed launch overhead) [assumed].
_UNTIMED = LogNormal(0.0, 0.3)
# Engines without recorded runs: as much as whole runs of a fitted one leave, twice [assumed].
_UNKNOWN_STEPS = LogNormal(0.0, 0.1)
_UNKNOWN_PROMPTS = LogNormal(0.0, 0.2)
# Front ends: another host CPU, another version of the server [assumed].
_SERVER_TIMES = LogNormal(0.0, 0.4)
# The datasheet's peaks: real kernels reach 0.5 to 0.9 of them where they are large, and less where they are small:
# the median kernel of serving sizes takes 1.6 to 2.4 times the roofline (see `perfmodel.cost.datasheet`).
_DATASHEET_KERNELS = LogNormal(0.4, 0.25)
_DATASHEET_STEPS = LogNormal(0.0, 0.25)


@dataclass(frozen=True, slots=True)
class Draw:
    """Factors on times; `kernel` has those of operator families."""

    step: float
    prompt: float
    server: float
    scores: Scores
    spread: float
    is_datasheet: bool

    def kernel(self, family: str, residuals: Residuals) -> float:
        """The factor on kernels of `family` whose fit left `residuals`."""
        score = self.scores[_FAMILIES.get(family, _OTHERS)]
        if self.is_datasheet:
            return _DATASHEET_KERNELS.at(score)
        if not residuals.num_rows:
            return _UNTIMED.at(score)
        return exp(LogNormal.of(residuals, COMMON * self.spread).sigma * score)

    def of_server(self, server: ServerFit) -> ServerFit:
        """The front end's times under this draw."""
        return server.model_copy(update={name: value * self.server for name, value in server})


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """How far times may be from what a calibration and an engine's profile say."""

    step: LogNormal
    prompt: LogNormal
    server: LogNormal
    spread: float
    is_datasheet: bool

    @classmethod
    def of(cls, calibration: Calibration, profile: EngineProfile, is_closed_loop: bool = False) -> "Uncertainty":
        """is_closed_loop: whether a fixed number of requests is in flight, as in the runs of `tpot_residuals`"""
        spread = calibration.spread
        if calibration.origin == "datasheet":
            return cls(_DATASHEET_STEPS, _UNKNOWN_PROMPTS, _SERVER_TIMES, spread, True)
        whole_runs = (profile.latency_residuals, profile.tpot_residuals)
        candidates = (*(reversed(whole_runs) if is_closed_loop else whole_runs), calibration.step_residuals)
        known = next((residuals for residuals in candidates if residuals.num_rows), None)
        step = LogNormal.of(known, spread) if known is not None else _UNKNOWN_STEPS
        return cls(step, _prompts(profile, calibration), _SERVER_TIMES, spread, False)

    def draw(self, scores: Scores) -> Draw:
        return Draw(
            self.step.at(scores[_STEP]),
            self.prompt.at(scores[_PROMPT]),
            self.server.at(scores[_SERVER]),
            scores,
            self.spread,
            self.is_datasheet,
        )


def _prompts(profile: EngineProfile, calibration: Calibration) -> LogNormal:
    """Of what prompts add: TTFT errs by steps and prompts, TPOT by steps alone."""
    if not profile.ttft_residuals.num_rows:
        has_steps_only = calibration.step_residuals.num_rows and not profile.latency_residuals.num_rows
        return LogNormal() if has_steps_only else _UNKNOWN_PROMPTS
    first, later = (LogNormal.of(r, calibration.spread) for r in (profile.ttft_residuals, profile.tpot_residuals))
    beyond = max(first.sigma**2 - later.sigma**2, 0.0) ** 0.5
    return LogNormal(first.centre - later.centre, beyond)
