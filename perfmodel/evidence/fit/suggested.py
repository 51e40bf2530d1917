"""Which load tests of one's own server would narrow the intervals of a deployment most.

Mean latencies depend on four errors that a run keeps (`perfmodel.cost.calibrations.draws`), each a standard normal
score; ensembles of simulations give the derivatives J of their logarithms. A load test measures TTFT and TPOT, up to
what is left of a run once its server is known. After it the scores' covariance is (1 + sum of J^T J / noise^2)^-1, and
the variance of the deployment's figures follows (MacKay 1992, "Information-based objective functions for active data
selection"). Runs are chosen one after another, each the shortest of those that leave about the least. How wide the
intervals will be is told by the rule of the fit (`server_fit`), which trusts few runs less: as it would have them where
runs left out are off by the noise."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import numpy as np

from perfmodel.cost import EngineProfile
from perfmodel.cost.calibrations.draws import NUM_SCORES, Z_P90
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.server_fit import ENOUGH_REQUESTS, FEWEST_FOR_INTERVALS, OVERLOADED, PER_SLOT, UserServerFit
from perfmodel.evidence.observation import Floats, Progress, reported
from perfmodel.evidence.predict.bench import NEVER_SENT, UNSTATED
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.records.ensemble import Ensemble, design
from perfmodel.specs.scenario import Scenario

FIGURES = ("ttft", "tpot", "e2el")
_MEASURED = FIGURES[:2]
# Log errors of TTFT and TPOT under a fit to the server's other runs: TPOT's as of published sweeps, in
# docs/your-server.md; TTFT's [assumed].
_NOISE = np.array([0.1, 0.03])
_NUM_RUNS = 3
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


def with_certainty(fit: UserServerFit, scenario: Scenario) -> UserServerFit:
    """`fit` with what it changed of the intervals of `scenario`; as it is where that has none."""
    try:
        before, after = (half_widths(scenario, profile) for profile in (fit.shipped, fit.profile))
    except PerfmodelError:
        return fit
    return replace(fit, certainty={figure: (before[figure], after[figure]) for figure in FIGURES})


def suggest_runs(
    scenario: Scenario, source: str, overrides: Sequence[str] = (), progress: Progress | None = None
) -> Suggestion:
    """The load tests that narrow the intervals of `scenario` most; source, overrides: what the user calls it, and
    `--set`. Raises SpecError where no interval or no load below capacity can be simulated."""
    run = _run(scenario)
    deployment = _slopes(run)
    tried = dict[str, RunResult]()
    given = list(_candidates(scenario, run))
    for what, traffic in reported(given, len(given), progress):
        try:
            candidate = _run(scenario.with_({"traffic": traffic}))
        except PerfmodelError:
            continue  # too long for the model's context, or for its memory
        if candidate.summary["mean_ttft_ms"] < OVERLOADED * candidate.summary["mean_e2el_ms"]:
            tried[what] = candidate
    if not tried:
        raise SpecError(
            f"{scenario.name}: is overloaded at a quarter of its load; lower traffic.arrivals, then measure."
        )
    slopes = {what: _slopes(candidate)[: len(_MEASURED)] for what, candidate in tried.items()}
    durations = {what: float(candidate.summary["duration"]) for what, candidate in tried.items()}
    now, runs = np.diag(_covariance(deployment, np.eye(NUM_SCORES))), list[SuggestedRun]()
    for number, what in enumerate(_chosen(deployment, slopes, durations), 1):
        variances = (now + number * _NOISE[[0, 1, 1]] ** 2) / (1 + number) if number >= FEWEST_FOR_INTERVALS else now
        command = _command(tried[what].scenario, number)
        runs.append(SuggestedRun(what, command, durations[what] / 60, _shares(np.minimum(variances, now))))
    files = (f"suggested-{number}.json" for number in range(1, len(runs) + 1))
    words = ["perfmodel", "calibrate", "--from", *files, "--scenario", source, "--name", "my-server", "--engine"]
    words.append(scenario.engine.described.description.name)
    # The suggested requests are of random text, for the model itself.
    plain = {**UNSTATED, **NEVER_SENT}.items()
    without = (f"traffic.{key}={json.dumps(value)}" for key, value in plain if getattr(scenario.traffic, key) != value)
    for text in (*(text for text in overrides if not text.startswith("traffic")), *without):
        words += ["--set", text]
    return Suggestion(scenario.name, _shares(now), tuple(runs), shlex.join(words))


def _chosen(deployment: Floats, slopes: Mapping[str, Floats], durations: Mapping[str, float]) -> Iterator[str]:
    """Candidates one after another: of those that leave about the least variance after the ones before, the shortest.
    deployment, slopes: derivatives by the scores, of the deployment and of each candidate's TTFT and TPOT"""
    information, rest = np.eye(NUM_SCORES), dict(slopes)
    for _ in range(min(_NUM_RUNS, len(rest))):
        left = {what: float(np.trace(_covariance(deployment, _known(information, own)))) for what, own in rest.items()}
        most = _AS_GOOD * min(left.values())
        best = min((what for what in rest if left[what] <= most), key=lambda what: durations[what])
        information = _known(information, rest.pop(best))
        yield best


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
                what, number = f"{slots:,} in flight", max(ENOUGH_REQUESTS, PER_SLOT * slots)
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
