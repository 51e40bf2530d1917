"""`make_plan`: from a scenario with an SLO to the deployment that is best by the plan's objective.

    stage one    every candidate in closed form (`screen`)
    stage two    finalists on the simulator (`runs`): their highest rates, and the whole at the wanted rate; candidates
                 that the screen may have cut wrongly (`overlooked`); then what more money buys (`front`), and how sure
                 the order is (`draws`)

All that stage two evaluates is in a store on disk: a plan that was stopped goes on where it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from perfmodel.files.blocks import block_as
from perfmodel.planning.choice import (
    Ratios,
    compared_prices,
    deployed,
    device_answers,
    finalists,
    may_have,
    objective_key,
    origin_notes,
    overlooked,
    ratios_of,
    screened_front,
    shortfalls,
    simulated_front,
    with_every_device,
)
from perfmodel.planning.finalist import (
    Deployment,
    Finalist,
    Preliminary,
    PreliminaryJob,
    Records,
    Screened,
    attained,
    certainty_of,
    pick,
)
from perfmodel.planning.jobs import plan_job
from perfmodel.planning.points import device_shares
from perfmodel.planning.result import JobPlan, PlanResult, quantile_name
from perfmodel.planning.runs import Runs, left_out, under_failures
from perfmodel.planning.screen import Screen
from perfmodel.planning.service import at_rate, wanted_rate
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweep import Forecast, Store, StoredSweep, default_store
from perfmodel.planning.workers import Progress
from perfmodel.sim.driver import simulate
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

Tell = Callable[[Preliminary | PreliminaryJob], None]
Stages = Callable[[str], AbstractContextManager[Progress | None]]  # a stage's name -> what shows how far it is

_FRONT = "front"  # a task of the forecast
_REQUESTS = 400  # of the run that says what bounds the winner


def make_plan(
    path: str,
    overrides: Sequence[str] = (),
    store: Path | None = None,
    workers: int | None = None,
    engine: str = "local",
    stages: Stages | None = None,
    tell: Tell | None = None,
) -> PlanResult | JobPlan:
    """The plan of the scenario at `path` (a name or a file), with its `plan` block or the defaults of one; of an
    offline job where its objective says so.

    overrides: as `--set` takes them
    store:     file with points that are already known, and for those evaluated now; default: the user's
    workers, engine: as for `perfmodel.planning.sweep`
    stages:    a stage's name -> what shows its progress
    tell:      called with what the screen has found, before anything is simulated

    Raises SpecError for a scenario without an SLO or a rate, or with a mistake in it.
    """
    base, shown = Base(path, tuple(overrides)), stages or (lambda _: nullcontext())
    scenario = base.load()
    spec = block_as(scenario.plan, PlanSpec) or PlanSpec()
    file = store or default_store()
    Store(file).close()  # a file that cannot be used is refused before the search
    sweep = StoredSweep(str(file), workers, engine)
    if spec.is_offline:
        return plan_job(base, scenario, spec, sweep, shown, tell)
    return _plan_rate(base, scenario, spec, sweep, shown, tell)


def _plan_rate(
    base: Base,
    scenario: Scenario,
    spec: PlanSpec,
    sweep: StoredSweep,
    shown: Stages,
    tell: Tell | None,
) -> PlanResult:
    """The plan that serves a rate. sweep: does the simulations; the rest as there."""
    rate = wanted_rate(scenario, spec)
    with shown("screening"):
        space = enumerate_space(base, spec)
        screen = Screen(space.candidates, scenario, spec.attainment)
        screened = screen.all()
        serving = _deployments(screen, screened, spec, rate)
        front = screened_front(screen, serving, spec, rate)
    chosen = with_every_device(finalists(serving, spec), serving, spec)
    if tell is not None:
        tell(Preliminary(rate, spec, len(space.candidates), tuple(chosen)))
    known = {id(deployment.screened) for deployment in serving}
    too_slow = [Deployment(candidate, 0) for candidate in screened if id(candidate) not in known]
    with shown("simulating the finalists' requests") as progress:
        run = Runs(base, scenario, spec, rate, replace(sweep, forecast=Forecast(progress)))
        stage_two = _simulated(run, screen, chosen, front, [*serving, *too_slow])
    simulated = stage_two.at_rate
    serve, do_not = simulated_front(simulated, front, spec, scenario.slo, quantile_name(spec.attainment))
    reasons = dict(space.ruled_out) | shortfalls(screened, spec, rate)
    nearest = "" if serving else _nearest(screened, rate)
    counts = space.num_all, len(serving)
    good, bad = _judged(stage_two.finalists, scenario, spec)
    result = PlanResult(base, scenario, spec, rate, *counts, reasons, good, bad, serve, do_not, nearest=nearest)
    result = replace(result, searched=space.searched, ratios=stage_two.ratios, num_overlooked=stage_two.num_left)
    result = _completed(_ordered(result), simulated)
    judged = result.ranked, result.missed
    result = replace(result, devices=device_answers(spec, rate, judged, serving, screened, space.by_device))
    with shown("under failures"):
        resilience = under_failures(result, result.winner) if result.winner is not None else None
    return replace(result, resilience=resilience, left_out=left_out(scenario))


@dataclass(frozen=True)
class _Simulated:
    """The results of the simulator.

    finalists: at the wanted rate
    at_rate:   all that was simulated there, those of the front included, by label
    ratios:    simulated figures over those of the screen
    num_left:  candidates that the screen has cut by less than the spread of these ratios, and that were not simulated
    """

    finalists: list[Finalist]
    at_rate: dict[str, tuple[Deployment, Records]]
    ratios: Ratios
    num_left: int


def _simulated(
    run: Runs, screen: Screen, chosen: Sequence[Deployment], front: Sequence[Deployment], cut: Sequence[Deployment]
) -> _Simulated:
    """`chosen`, `front`, and those of `cut` that may be better; what does not serve by the screen has no replicas."""
    run.sweep.forecast.expect(_FRONT, run.num_requests([(deployment, deployment.replicas) for deployment in front]))
    done = run.settled(chosen)
    tried = {id(deployment.screened) for deployment in chosen}
    room = ceil(run.spec.finalists / 2)
    while near := _overlooked(run, done, [deployment for deployment in cut if id(deployment.screened) not in tried]):
        more, room = near[:room], room - len(near[:room])
        if not more:
            break
        tried |= {id(deployment.screened) for deployment in more}
        done += run.settled(more)
    drawn = _sized(run, _drawn(screen, done, run.rate))
    return _Simulated(drawn, _with_front(run, screen, done, front), _ratios(run, done), len(near))


def _overlooked(run: Runs, done: Sequence[Finalist], cut: Sequence[Deployment]) -> list[Deployment]:
    """Those of `cut` that may be better than the best of `done`."""
    draft = PlanResult(
        run.base, run.scenario, run.spec, run.rate, 0, 0, {}, _judged(done, run.scenario, run.spec)[0], ()
    )
    sign = 1.0 if draft.is_better_low else -1.0
    best = min((sign * draft.figure(finalist) for finalist in draft.ranked), default=None)
    return overlooked(cut, best, _ratios(run, done), run.spec, run.rate)


def _ratios(run: Runs, done: Sequence[Finalist]) -> Ratios:
    return ratios_of(done, run.scenario.slo, quantile_name(run.spec.attainment))


def _judged(done: Sequence[Finalist], scenario: Scenario, spec: PlanSpec) -> tuple[list[Finalist], list[Finalist]]:
    """Those that serve within the SLO, and those that do not."""
    good = [each for each in done if each.serves(scenario.slo, spec.attainment)]
    return good, [each for each in done if each not in good]


def _sized(run: Runs, done: Sequence[Finalist]) -> list[Finalist]:
    """The finalists with as many replicas as suffice in the wanted share of draws, simulated with these at the rate; as
    many as are allowed where more are needed."""
    draft = PlanResult(run.base, run.scenario, run.spec, run.rate, 0, 0, {}, [], done)
    counts = [_enough(draft, finalist) for finalist in done]
    more = [place for place, finalist in enumerate(done) if counts[place] != finalist.replicas]
    records = run.at_rate([(done[place].deployment, counts[place]) for place in more])
    sized = list(done)
    for place, known in zip(more, records, strict=True):
        sized[place] = sized[place].sized(counts[place], known)
    return sized


def _enough(result: PlanResult, finalist: Finalist) -> int:
    """Replicas that suffice in the wanted share of draws; the most that are allowed where these do not."""
    if result.spec.objective == "lowest_latency":
        return finalist.replicas
    option, screened = result.option(finalist), finalist.deployment.screened
    counts = range(finalist.replicas, option.most + 1)
    return option.enough([count for count in counts if may_have(screened, result.spec, count)], result.spec.confidence)


def _ordered(result: PlanResult) -> PlanResult:
    """The choice first; then what else is sure enough, best first by expected cost, or by the objective where that is
    no cost."""
    if not result.ranked:
        return result
    options = [result.option(each) for each in result.ranked]
    choice = pick(options, result.spec.confidence)
    everyone = [*options, *(result.option(each) for each in result.missed)]
    expected = certainty_of(everyone, choice, result.spec.confidence).expected

    def key(place: int) -> tuple[bool, bool, float, float]:
        each = options[place]
        figure = expected[each.name] if each.figure is None else each.figure
        return place != choice, each.share < result.spec.confidence, figure, -result.ranked[place].rate

    return replace(result, ranked=[result.ranked[place] for place in sorted(range(len(options)), key=key)])


def _drawn(screen: Screen, done: Sequence[Finalist], rate: float) -> list[Finalist]:
    """The finalists with what common draws of the calibration's errors make of them, of their latencies as near to
    the highest rate of the closed form as the wanted rate is to the simulated one."""
    rates = [rate * each.deployment.screened.rate / max(each.rate, 1e-9) for each in done]
    drawn = screen.under_draws([each.deployment.screened for each in done], rates)
    return [replace(each, drawn=factors) for each, factors in zip(done, drawn, strict=True)]


def _with_front(
    run: Runs, screen: Screen, done: Sequence[Finalist], front: Sequence[Deployment]
) -> dict[str, tuple[Deployment, Records]]:
    """All deployments that were simulated at the rate, and those of the front now; by label."""
    simulated = [(replace(one.deployment, replicas=n), known) for one in done for n, known in one.runs.items()]
    labels = {deployment.label for deployment, _ in simulated}
    missing = [deployment for deployment in front if deployment.label not in labels]
    run.sweep.forecast.expect(_FRONT, 0)
    records = run.at_rate([(deployment, deployment.replicas) for deployment in missing])
    by_label = {whole.label: (whole, known) for whole, known in (*simulated, *zip(missing, records, strict=True))}
    whole = [deployment for deployment, _ in by_label.values()]
    near = screen.tightness([one.screened for one in whole], [run.rate / one.replicas for one in whole])
    return {
        label: (replace(deployment, tightness=value), known)
        for (label, (deployment, known)), value in zip(by_label.items(), near, strict=True)
    }


def _completed(result: PlanResult, simulated: Mapping[str, tuple[Deployment, Records]]) -> PlanResult:
    """The result with what bounds the winner."""
    if result.winner is None:
        return result
    choices = result.winner.deployment.screened.candidate.choices(result.winner.replicas)
    traffic = at_rate(result.scenario, result.rate, _REQUESTS)
    run = simulate(result.base.load(as_overrides({**choices, **traffic})), keep_steps=False)
    notes = [
        *run.notes,
        *origin_notes(result.winner.deployment.screened.origin),
    ]
    if result.scenario.traffic.arrivals.process == "trace":
        notes.append("Arrivals are the trace's own, at other rates the same with longer or shorter gaps.")
    notes = list(dict.fromkeys([*notes, *_prices(result)]))
    fewer = {
        label: attained(records)
        for label, (each, records) in simulated.items()
        if each.screened is result.winner.deployment.screened and each.replicas < result.winner.fewest
    }
    return replace(result, bound_share=device_shares(run.summary), notes=notes, fewer=fewer)


def _prices(result: PlanResult) -> Iterator[str]:
    """The prices that finalists are compared by, with source and date, and which of them are old."""
    finalists = (*result.ranked, *result.missed)
    layouts = [layout for finalist in finalists for layout, _ in finalist.deployment.screened.candidate.counts]
    scenarios = [layout.scenario for layout in layouts]
    devices = dict.fromkeys(scenario.hardware.name for scenario in scenarios)
    price = result.scenario.price
    if price is not None and not isinstance(price.usd_per_gpu_hour, dict) and len(devices) > 1:
        yield (
            f"price.usd_per_gpu_hour {price.usd_per_gpu_hour:g} of the scenario is that of every device here, "
            f"{', '.join(devices)}; give each its own, as in --price {next(iter(devices))}=2.50."
        )
    yield from compared_prices(scenarios)


def _deployments(screen: Screen, screened: Sequence[Screened], spec: PlanSpec, rate: float) -> list[Deployment]:
    """What serves the rate, with how near its limits come, best first."""
    found = deployed(screened, spec, rate)
    near = (
        screen.tightness([each.screened for each in found], [rate / each.replicas for each in found]) if found else []
    )
    found = [replace(each, tightness=value) for each, value in zip(found, near, strict=True)]
    return sorted(found, key=lambda deployment: objective_key(deployment, spec))


def _nearest(screened: Sequence[Screened], rate: float) -> str:
    """What would serve the rate with the fewest devices, were they allowed."""
    if not screened:
        return "None of the candidates can run, for the reasons below; widen plan.space accordingly."
    able = [candidate for candidate in screened if candidate.rate > 0]
    if not able:
        return "No candidate meets the SLO even for a single user; relax it, or add faster devices to plan.space."
    best = max(able, key=lambda candidate: candidate.rate_per_device)
    count = ceil(rate / best.rate - 1e-9)
    return (
        f"The highest rate per device is that of {best.candidate.label}, {best.rate:.3g} requests/s on "
        f"{best.candidate.num_devices}; {count} of them, {count * best.candidate.num_devices} GPUs, would suffice."
    )
