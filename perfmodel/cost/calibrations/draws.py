"""`Draw`: one plausible set of error factors on predicted times, for ensembles of simulations.

Calibration errors are correlated within a run: a kernel that is slow in one step is slow in all. A draw fixes such
errors as log-normal factors (scores in standard deviations):

    kernels   a factor per operator family, sigma = common * spread * (p90 - p50) / 1.2816 of its fit's residuals up,
              (p50 - p10) down; `common` is the part shared by all calls of a run (`KernelErrors`)
    step      every step, device and host: spread times the residuals of whole runs under the engine
    prompt    what prompts add to a step, device and host: residuals of TTFT beyond those of steps
    server    the front end's times

`spread` is the calibration's transfer factor; residuals of steps are in units of it. Fits without residuals, engines
without recorded runs and the datasheet have assumed spreads."""

from math import exp
from typing import NamedTuple

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.engine_profile import EngineProfile, ServerFit
from perfmodel.cost.calibrations.for_all import load_kernel_errors
from perfmodel.cost.kernel_models.fits import Residuals

# Standard deviations, each of two factors: fewer scores take fewer draws, and two that share one count as going wrong
# together, which is on the wide side. So they are paired that no latency owes much to both.
Scores = tuple[float, ...]

_STEP, _PROMPT, _SERVER, _OTHERS = 0, 1, 2, 3
_FAMILIES = {
    "attention_prefill": 0,
    "latent_prefill": 0,
    "attention_sparse": 0,
    "attention_decode": 1,
    "attention_mixed": 1,
    "gemm": 2,
    "moe": 3,
}
NUM_SCORES = 4

Z_P90 = 1.2816  # 90th percentile of a standard normal: half an 80 % interval, in standard deviations


class LogNormal(NamedTuple):
    """exp(centre + sigma * score), with separate sigmas for positive and negative scores."""

    centre: float = 0.0
    up: float = 0.0
    down: float = 0.0

    def at(self, score: float) -> float:
        return exp(self.centre + (self.up if score > 0 else self.down) * score)

    @classmethod
    def of(cls, residuals: Residuals, widened: float = 1.0) -> "LogNormal":
        up, down = residuals.p90 - residuals.p50, residuals.p50 - residuals.p10
        return cls(residuals.p50, widened * up / Z_P90, widened * down / Z_P90)

    @classmethod
    def even(cls, sigma: float, centre: float = 0.0) -> "LogNormal":
        return cls(centre, sigma, sigma)

    def widened(self, factor: float) -> "LogNormal":
        return LogNormal(self.centre, factor * self.up, factor * self.down)

    def beyond(self, other: "LogNormal") -> "LogNormal":
        """The rest of this factor without the independent factor `other`."""
        up, down = (max(a**2 - b**2, 0.0) ** 0.5 for a, b in ((self.up, other.up), (self.down, other.down)))
        return LogNormal(self.centre - other.centre, up, down)


# Operators without measurements in a calibration (elementwise kernels at an assumed launch overhead) [assumed].
_UNTIMED = LogNormal.even(0.2)
# Engines without recorded runs: as much as whole runs of a fitted one leave, twice [assumed].
_UNKNOWN_STEPS = LogNormal.even(0.1)
_UNKNOWN_PROMPTS = LogNormal.even(0.2)
# Prompts on engines of their own, handed on over a network: profiles are fitted to servers that decode beside them. As
# much wider as intervals are for the fits of a sibling device [assumed].
_OWN_ENGINES = 1.5
# Front ends: another host CPU, another version of the server [assumed].
_SERVER_TIMES = LogNormal.even(0.3)
# The datasheet: real kernels reach 0.5 to 0.9 of the peaks, and cost less to launch in a CUDA graph than it assumes.
# Decode steps of recorded servers take 0.87 to 1.4 times as long (80 % of 60 steady states), steps with prompts, whose
# launches and preparation it does not know, up to five times.
_DATASHEET_KERNELS = LogNormal.even(0.15, centre=0.05)
_DATASHEET_STEPS = LogNormal.even(0.15, centre=0.03)
_DATASHEET_PROMPTS = LogNormal.even(0.5, centre=0.8)


class Draw(NamedTuple):
    """Error factors on times; `kernel` has those of operator families."""

    step: float
    prompt: float
    server: float
    scores: Scores
    spread: float
    is_datasheet: bool

    def kernel(self, family: str, residuals: Residuals) -> float:
        """The factor on kernels of `family`, whose fit has these residuals."""
        score = self.scores[_FAMILIES.get(family, _OTHERS)]
        if self.is_datasheet:
            return _DATASHEET_KERNELS.at(score)
        if not residuals.num_rows:
            return _UNTIMED.at(score)
        return LogNormal.of(residuals, load_kernel_errors().of(family) * self.spread).at(score) / exp(residuals.p50)

    def of_server(self, server: ServerFit) -> ServerFit:
        return server.model_copy(update={name: value * self.server for name, value in server})


class Uncertainty(NamedTuple):
    """Error distributions of a calibration and an engine's profile."""

    step: LogNormal
    prompt: LogNormal
    server: LogNormal
    spread: float
    is_datasheet: bool

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        profile: EngineProfile,
        is_closed_loop: bool = False,
        is_disaggregated: bool = False,
    ) -> "Uncertainty":
        """The uncertainty that residuals of `calibration` and of the engine's `profile` leave.

        is_closed_loop: a fixed concurrency, as in the runs of `tpot_residuals`; is_disaggregated: prefill engines
        apart, as in none of them"""
        spread = calibration.spread
        if calibration.origin == "datasheet":
            return cls(_DATASHEET_STEPS, _DATASHEET_PROMPTS, _SERVER_TIMES, spread, True)
        profile = profile.on(calibration.device)
        whole_runs = (profile.latency_residuals, profile.tpot_residuals)
        candidates = (*(reversed(whole_runs) if is_closed_loop else whole_runs), calibration.step_residuals)
        known = next((residuals for residuals in candidates if residuals.num_rows), None)
        step = LogNormal.of(known, spread) if known is not None else _UNKNOWN_STEPS
        prompt = _prompts(profile, calibration)
        if profile.name and known in whole_runs:  # of this very server: its kernels' errors are among theirs
            spread = 0.0
        return cls(step, prompt.widened(_OWN_ENGINES) if is_disaggregated else prompt, _SERVER_TIMES, spread, False)

    def draw(self, scores: Scores) -> Draw:
        step, prompt = self.step.at(scores[_STEP]), self.prompt.at(scores[_PROMPT])
        return Draw(step, prompt, self.server.at(scores[_SERVER]), scores, self.spread, self.is_datasheet)


def _prompts(profile: EngineProfile, calibration: Calibration) -> LogNormal:
    """Error of what prompts add: TTFT has errors of steps and prompts, TPOT of steps alone. It is the engine's
    (launches, preparation on the host), so it does not widen with the transfer of kernel fits."""
    if calibration.prompt_residuals.num_rows:
        steps = LogNormal.of(calibration.step_residuals, calibration.spread)
        return LogNormal.of(calibration.prompt_residuals, calibration.spread).beyond(steps)
    if not profile.ttft_residuals.num_rows:
        has_steps_only = calibration.step_residuals.num_rows and not profile.latency_residuals.num_rows
        return LogNormal() if has_steps_only else _UNKNOWN_PROMPTS
    return LogNormal.of(profile.ttft_residuals).beyond(LogNormal.of(profile.tpot_residuals))
