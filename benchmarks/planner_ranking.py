"""Whether the planner's screen puts the right candidates before the simulator.

    python benchmarks/planner_ranking.py [--problems 50] [--store FILE] [--report FILE.md]

Random planning problems: a model, lengths, an SLO, a rate, two kinds of devices, sixteen candidates or more. Every
candidate that serves anything is simulated, with the same requests, for its highest rate under the SLO. Asked is
whether the one that the simulator finds best by the problem's objective is among the screen's first five; where it is
not, whether a plan would have called the order of the two in doubt: in how many common draws of the model's errors,
with three seeds, it is better than the best of the five. Also: how far the screen's rates are from the simulated ones.

Every simulated point is in the store: a run that was stopped goes on where it was.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from pathlib import Path

import numpy as np

from perfmodel.planning.finalist import Finalist, Screened
from perfmodel.planning.points import Record
from perfmodel.planning.result import PlanResult
from perfmodel.planning.runs import Trial, try_rates
from perfmodel.planning.screen import Screen
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweep import StoredSweep
from perfmodel.planning.workers import spread

_MODELS = ("llama-3.1-8b", "qwen3-14b", "qwen3-30b-a3b", "mixtral-8x7b", "llama-3.1-70b", "llama-3.1-70b-fp8")
_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm", "l40s")
_TOP = 5
_SURE = 0.9  # of the draws: below, the order of two is in doubt
_SEEDS = 3  # where the order of two is asked


@dataclass(frozen=True)
class Problem:
    """One planning problem, drawn from a number."""

    number: int
    overrides: tuple[str, ...]
    space: dict[str, tuple[object, ...]]
    objective: str
    ask: float  # the wanted rate, over what a middling candidate serves
    store: str

    @property
    def label(self) -> str:
        return ", ".join(text for text in self.overrides if text.split("=")[0] in ("model", "slo"))


@dataclass(frozen=True)
class Solved:
    """Candidates in the screen's order, with the rates that were simulated."""

    problem: Problem
    place: int | None  # of the simulated best in the screen's order, from 1; None: nothing serves
    num_candidates: int
    ratios: tuple[float, ...]  # screened over simulated rates
    better: float  # share of draws in which the best is better than the best of the screen's five
    loss: float  # by what share the best of the screen's five is worse than the best of all
    best: str = ""
    seconds: float = 0.0


def drawn(number: int, store: str) -> Problem:
    """The problem of a number: lengths, limits and devices as they come in practice, log-uniformly."""
    rng = random.Random(number)

    def between(low: float, high: float) -> float:
        return exp(rng.uniform(log(low), log(high)))

    prompt, answer = between(100, 4000), between(30, 500)
    lengths = (prompt, prompt * rng.uniform(2, 5), answer, answer * rng.uniform(2, 4))
    overrides = (
        f"model={rng.choice(_MODELS)}",
        "engine.max_model_len=32768",
        f"traffic.input_tokens={{distribution: lognormal, mean: {lengths[0]:.0f}, p99: {lengths[1]:.0f}, max: 24000}}",
        f"traffic.output_tokens={{distribution: lognormal, mean: {lengths[2]:.0f}, p99: {lengths[3]:.0f}, max: 4000}}",
        f"slo={{ttft_ms: {between(300, 4000):.0f}, tpot_ms: {between(20, 150):.0f}}}",
    )
    space: dict[str, tuple[object, ...]] = {
        "hardware": tuple(rng.sample(_DEVICES, 2)),
        "tensor_parallel_size": tuple(sorted(rng.sample((1, 2, 4, 8), 2))),
        "max_num_seqs": tuple(sorted(rng.sample((16, 64, 256), 2))),
        "max_num_batched_tokens": tuple(sorted(rng.sample((1024, 2048, 4096, 8192), 2))),
        "disaggregation": ("none", "1:1") if rng.random() < 0.25 else ("none",),
    }
    objective = rng.choice(("goodput_per_gpu", "cheapest"))
    return Problem(number, overrides, space, objective, between(0.3, 5), store)


def solve(problem: Problem) -> Solved:
    """All candidates screened and simulated."""
    began = time.process_time()
    base = Base("llama-3.1-8b-a100", problem.overrides)
    spec = PlanSpec.model_validate({"space": problem.space, "objective": problem.objective, "max_gpus": 16})
    scenario = base.load()
    candidates = enumerate_space(base, spec).candidates
    screen = Screen(candidates, scenario, spec.attainment)
    serving = [item for item in screen.all() if item.rate > 0.02]
    patience_s = (scenario.slo.ttft_ms or 0.0) / 1e3
    rates = [_simulated(base, item, spec, problem.store, patience_s, 0) for item in serving]
    if not any(rates):
        return Solved(problem, None, len(serving), (), 1.0, 0.0)
    wanted = problem.ask * float(np.median([rate for rate in rates if rate]))

    def key(each: Screened, rate: float) -> float:
        """Smaller is better."""
        if problem.objective == "cheapest":
            return ceil(wanted / rate) * (each.candidate.usd_per_hour or 0.0) if rate else float("inf")
        return -rate / each.candidate.num_devices

    order = sorted(range(len(serving)), key=lambda i: (key(serving[i], serving[i].rate), -serving[i].rate))
    truth = [key(item, rate or 0.0) for item, rate in zip(serving, rates, strict=True)]
    best = min(truth)
    place = next(place for place, i in enumerate(order, 1) if truth[i] <= best + 1e-9 * abs(best))
    result = min(order[:_TOP], key=lambda i: truth[i])
    loss = truth[result] / best - 1 if problem.objective == "cheapest" else 1 - truth[result] / best
    winner = order[place - 1]
    ratios = tuple(item.rate / rate for item, rate in zip(serving, rates, strict=True) if rate)
    share = 1.0
    if place > _TOP:
        plan = PlanResult(base, scenario, spec, rate=wanted)
        share = _better(plan, screen, problem.store, serving[winner], serving[result])
    label, seconds = serving[winner].candidate.label, time.process_time() - began
    return Solved(problem, place, len(serving), ratios, share, loss, label, seconds)


def _better(plan: PlanResult, screen: Screen, store: str, one: Screened, other: Screened) -> float:
    """The share of draws, common to both, in which `one` is better, as in a plan."""
    better = []
    patience_s = (plan.scenario.slo.ttft_ms or 0.0) / 1e3
    for item, drawn in zip(
        (one, other), screen.under_draws([one, other], [entry.rate for entry in (one, other)]), strict=True
    ):
        rates = [_simulated(plan.base, item, plan.spec, store, patience_s, seed) or 1e-6 for seed in range(_SEEDS)]
        group = exp(sum(map(log, rates)) / len(rates))
        replicas = ceil(plan.rate / group - 1e-9)
        met = Record({"request_goodput": 1.0, "request_throughput": 1.0})
        whole = tuple(replicas * rate for rate in rates)
        better.append(Finalist(item, replicas, 1.0, whole, (met,), drawn))
    return plan.better_share(*better)


def _simulated(base: Base, each: Screened, spec: PlanSpec, store: str, patience_s: float, seed: int) -> float | None:
    """The highest rate under one seed, in runs that last long enough for queues to show."""
    count = int(min(max(4 * each.batch * each.candidate.num_engines, 400, 20 * patience_s * each.rate), 8000))
    trial = Trial(base, each.candidate.overrides(1), seed, each.rate, spec.attainment, count)
    return StoredSweep(store).run(try_rates, {trial: count}, lambda *_: None)[0]


def lines(solved: Sequence[Solved]) -> list[str]:
    """What came of it."""
    asked = [item for item in solved if item.place is not None]
    within = [item for item in asked if (item.place or 99) <= _TOP]
    first = [item for item in asked if item.place == 1]
    others = [item for item in asked if item not in within]
    ratios = np.array([ratio for item in asked for ratio in item.ratios])
    off = np.exp(np.median(np.abs(np.log(ratios)))) - 1
    places = Counter(item.place or 0 for item in asked)
    result = [
        f"{len(solved)} problems, {len(asked)} of them with an answer (in the others no candidate meets the SLO); "
        f"{sum(item.num_candidates for item in asked)} candidates simulated.",
        f"The simulated best is among the screen's first {_TOP} in {len(within)} of {len(asked)} "
        f"({len(within) / len(asked):.0%}), first in {len(first)} ({len(first) / len(asked):.0%}). Its place: "
        f"{', '.join(f'{place} in {count}' for place, count in sorted(places.items()))}. Of several that are best "
        f"alike, as cheap ones that need as many replicas, the screen's first counts.",
        f"Screened over simulated rate: median {np.median(ratios):.2f}, 10th to 90th percentile "
        f"{np.quantile(ratios, 0.1):.2f} to {np.quantile(ratios, 0.9):.2f}; off by {off:.0%} in the median.",
    ]
    if others:
        in_doubt, lost = sum(item.better < _SURE for item in others), max(item.loss for item in others)
        result.append(
            f"Of the others, a plan would have called {in_doubt} of {len(others)} in doubt; lost by simulating five "
            f"only: {lost:.1%} at most."
        )
    for other in others:
        result.append(
            f"Not among them: problem {other.problem.number} ({other.problem.objective}; {other.problem.label}): best "
            f"{other.best}, place {other.place} of {other.num_candidates}, loss {other.loss:.1%}, "
            f"better in {other.better:.0%} of draws than the best of the {_TOP}"
            f"{': in doubt' if other.better < _SURE else ''}."
        )
    return result


def _told(done: int, of: int | None) -> None:
    print(f"{done} of {of} problems solved, {time.strftime('%H:%M:%S')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--store", type=Path, default=None, help="points that are already known")
    parser.add_argument("--report", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(arguments.store or Path(folder) / "points.sqlite")
        problems = [drawn(number, store) for number in range(arguments.first, arguments.first + arguments.problems)]
        solved = spread(solve, problems, _lost, _told)
    print(f"{sum(item.seconds for item in solved):.0f} CPU s")
    text = lines(solved)
    print("\n".join(text))
    if arguments.report is not None:
        command = f"python benchmarks/planner_ranking.py --problems {arguments.problems}"
        head = ["# The planner's screen beside the simulator", "", "```", command, "```"]
        arguments.report.write_text("\n".join([*head, "", *(f"- {line}" for line in text)]) + "\n", encoding="utf-8")


def _lost(problem: Problem, reason: str) -> Solved:
    return Solved(problem, None, 0, (), 1.0, 0.0, reason)


if __name__ == "__main__":
    main()
