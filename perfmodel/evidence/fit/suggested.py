"""Which load tests of one's own server would narrow the intervals of a deployment most.

Mean latencies depend on four errors that a run keeps (`perfmodel.cost.calibrations.draws`), each a standard normal
score; ensembles of simulations give the derivatives J of their logarithms. A load test measures TTFT and TPOT, up to
what is left of a run once its server is known. After it the scores' covariance is (1 + sum of J^T J / noise^2)^-1, and
the variance of the deployment's figures follows (MacKay 1992, "Information-based objective functions for active data
selection"). Runs are chosen one after another, each the shortest of those that leave about the least. How wide the
intervals will be is told by the rule of the fit (`server_fit`), which trusts few runs less: as it would have them where
runs left out are off by the noise."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from perfmodel.cost import EngineProfile
from perfmodel.cost.calibrations.draws import NUM_SCORES, Z_P90
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.server_fit import ENOUGH_REQUESTS, FEWEST_FOR_INTERVALS, OVERLOADED
from perfmodel.evidence.observation import Floats, Progress, reported
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.records.ensemble import Ensemble, design
from perfmodel.specs.scenario import Scenario

FIGURES = ("ttft", "tpot", "e2el")
_MEASURED = FIGURES[:2]
_NOISE = np.array(
    [0.1, 0.03]
)  # log errors of TTFT and TPOT under a fit to the server's other runs (docs/your-server.md)
_NUM_RUNS = 3
_PER_SLOT = 5  # requests of a load test in a closed loop
_MOST = 400  # requests of the deployment's own run, whose means have settled
_LOADS = (0.25, 0.6, 1.0)  # of the deployment's
_AS_GOOD = 1.05  # times the least variance left: of such runs the shortest
_SHORT = 8  # times shorter prompts or answers


@dataclass(frozen=True)
class SuggestedRun:
    """A load test. what: in words; minutes: it takes; widths: figure -> half of its 80 % interval once this run and
    those before it are in, as a share"""

    what: str
    command: str
    minutes: float
    widths: Mapping[str, float]


@dataclass(frozen=True)
class Suggestion:
    """What to measure for `scenario`. now: figure -> half of its 80 % interval, as a share"""

    scenario: str
    now: Mapping[str, float]
    runs: tuple[SuggestedRun, ...]
    then: str

    def to_json(self) -> dict[str, Any]:
        runs = [{**vars(run), "widths": dict(run.widths)} for run in self.runs]
        return {"scenario": self.scenario, "now": dict(self.now), "runs": runs, "then": self.then}


def half_widths(scenario: Scenario, profile: EngineProfile | None = None) -> dict[str, float]:
    """Figure -> half of the 80 % interval of its mean under `profile`, as a share. Raises SpecError without one."""
    return _shares(np.diag(_covariance(_slopes(_run(scenario, profile)), np.eye(NUM_SCORES))))


def suggest_runs(scenario: Scenario, source: str, progress: Progress | None = None) -> Suggestion:
    """The load tests that narrow the intervals of `scenario` most; source: what the user calls it. Raises SpecError
    where no interval or no load below capacity can be simulated."""
    run = _run(scenario)
    deployment = _slopes(run)
    candidates = dict[str, tuple[Scenario, RunResult, Floats]]()
    given = list(_candidates(scenario, run))
    for what, traffic in reported(given, len(given), progress):
        try:
            candidate = scenario.with_({"traffic": traffic})
            tried = _run(candidate)
        except PerfmodelError:
            continue  # too long for the model's context, or for its memory
        if tried.summary["mean_ttft_ms"] < OVERLOADED * tried.summary["mean_e2el_ms"]:
            candidates[what] = candidate, tried, _slopes(tried)[: len(_MEASURED)]
    if not candidates:
        raise SpecError(
            f"{scenario.name}: is overloaded at a quarter of its load; lower traffic.arrivals, then measure."
        )
    information, runs = np.eye(NUM_SCORES), list[SuggestedRun]()

    def left(what: str) -> Floats:
        return np.diag(_covariance(deployment, _known(information, candidates[what][2])))

    now = np.diag(_covariance(deployment, information))
    while candidates and len(runs) < _NUM_RUNS:
        most = _AS_GOOD * min(float(left(what).sum()) for what in candidates)
        as_good = [what for what in candidates if float(left(what).sum()) <= most]
        best = min(as_good, key=lambda what: float(candidates[what][1].summary["duration"]))
        candidate, tried, slopes = candidates.pop(best)
        information = _known(information, slopes)
        number = len(runs) + 1
        variances = (now + number * _NOISE[[0, 1, 1]] ** 2) / (1 + number) if number >= FEWEST_FOR_INTERVALS else now
        command = _command(candidate, number)
        widths = _shares(np.minimum(variances, now))
        runs.append(SuggestedRun(best, command, tried.summary["duration"] / 60, widths))
    files = " ".join(f"suggested-{number + 1}.json" for number in range(len(runs)))
    then = f"perfmodel calibrate --from {files} --scenario {shlex.quote(source)} --name my-server"
    return Suggestion(scenario.name, _shares(now), tuple(runs), then)


def _run(scenario: Scenario, profile: EngineProfile | None = None) -> RunResult:
    if scenario.traffic.num_requests is not None and scenario.traffic.num_requests > _MOST:
        scenario = scenario.with_({"traffic.num_requests": _MOST})
    return simulate(scenario, profile=profile, intervals=True, keep_steps=False)


def _slopes(run: RunResult) -> Floats:
    """Derivatives of the logarithms of mean TTFT, TPOT and E2E (rows) by the scores. Draws are rows of a Hadamard
    matrix, so each score's is a mean of products."""
    if not isinstance(run.ensemble, Ensemble):
        raise SpecError(f"{run.scenario.name}: has no interval that load tests could narrow.")
    logs, draws = run.ensemble.logs(), np.array(design())
    if missing := [figure for figure in FIGURES if figure not in logs]:
        raise SpecError(f"{run.scenario.name}: has no mean {missing[0]}; give answers of two tokens or more.")
    return np.array([draws.T @ (logs[figure][:, 0] - logs[figure][:, 1]) / 2 / len(draws) for figure in FIGURES])


def _known(information: Floats, slopes: Floats) -> Floats:
    weighted: Floats = slopes / _NOISE[:, None]
    return information + weighted.T @ weighted


def _covariance(slopes: Floats, information: Floats) -> Floats:
    result: Floats = slopes @ np.linalg.inv(information) @ slopes.T
    return result


def _shares(variances: Floats) -> dict[str, float]:
    return {figure: exp(Z_P90 * float(value) ** 0.5) - 1 for figure, value in zip(FIGURES, variances, strict=True)}


def _candidates(scenario: Scenario, run: RunResult) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what, traffic): a quarter, more than half and all of the load, at lengths as they are, or one of them short."""
    assert run.requests is not None
    prompt, answer = (
        max(2, round(float(n.mean()))) for n in (run.requests.num_prompt_tokens, run.requests.num_output_tokens)
    )
    arrivals = scenario.traffic.arrivals
    shapes = {
        f"prompts of {prompt:,}, answers of {answer:,}": (prompt, answer),
        f"prompts of {prompt:,}, answers of {max(2, answer // _SHORT):,}": (prompt, max(2, answer // _SHORT)),
        f"prompts of {max(2, prompt // _SHORT):,}, answers of {answer:,}": (max(2, prompt // _SHORT), answer),
    }
    for words, lengths in shapes.items():
        for share in _LOADS:
            if arrivals.concurrency is not None:
                slots = max(1, round(share * arrivals.concurrency))
                load = {"process": "closed_loop", "concurrency": slots}
                what, number = f"{slots:,} in flight", max(ENOUGH_REQUESTS, _PER_SLOT * slots)
            else:
                rate = float(f"{share * run.summary['request_throughput']:.3g}")
                load = {"process": "poisson", "rate": rate}
                what, number = f"{rate:g} requests/s", ENOUGH_REQUESTS
            fixed = [{"distribution": "fixed", "value": length} for length in lengths]
            traffic = {"arrivals": load, "num_requests": number, "input_tokens": fixed[0], "output_tokens": fixed[1]}
            yield f"{what}, {words}", traffic


def _command(candidate: Scenario, number: int) -> str:
    """`vllm bench serve`, which any server of OpenAI's API answers."""
    traffic, arrivals = candidate.traffic, candidate.traffic.arrivals
    assert traffic.input_tokens is not None
    assert traffic.output_tokens is not None
    load = ("--max-concurrency", arrivals.concurrency) if arrivals.concurrency else ("--request-rate", arrivals.rate)
    words: Sequence[Any] = (
        *("vllm", "bench", "serve", "--backend", "openai", "--base-url", "http://127.0.0.1:8000"),
        *("--model", candidate.model.hf_id or candidate.model.name, "--dataset-name", "random"),
        *("--random-input-len", traffic.input_tokens.value, "--random-output-len", traffic.output_tokens.value),
        # Another seed each: the prompts of a run before would be in the prefix cache.
        *("--ignore-eos", "--seed", number, "--num-prompts", traffic.num_requests, *load),
        *("--save-result", "--save-detailed", "--result-filename", f"suggested-{number}.json"),
    )
    return shlex.join(map(str, words))
