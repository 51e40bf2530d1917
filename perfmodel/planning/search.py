"""`make_plan`: the best deployment for a scenario with an SLO, by the plan's objective. Stage one screens every
candidate in closed form (`screen`). Stage two simulates (`runs`) finalists, candidates that the screen may have cut
wrongly (`overlooked`), the cost-latency `front`, and ranks them under calibration `draws`."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import ceil
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.files.blocks import block_as
from perfmodel.planning import choice
from perfmodel.planning import finalist as fin
from perfmodel.planning.elastic import over_the_load
from perfmodel.planning.encoders import encode_pool
from perfmodel.planning.finalist import Deployment, Finalist, Records, Screened
from perfmodel.planning.jobs import OnPreliminary, plan_job
from perfmodel.planning.mixes import mix_answers
from perfmodel.planning.points import device_shares
from perfmodel.planning.result import JobPlan, PlanResult, quantile_name
from perfmodel.planning.runs import Runs, left_out, under_failures
from perfmodel.planning.screen import Screen
from perfmodel.planning.service import at_rate, wanted_rate
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweep import Store, StoredSweep, default_store
from perfmodel.planning.workers import Watch
from perfmodel.sim.driver import simulate
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

Simulated = dict[str, tuple[Deployment, Records]]  # label -> what was simulated at the wanted rate
_FRONT = "front"  # a task of the forecast
_REQUESTS = 400  # of the run that says what bounds the winner


def make_plan(
    path: str,
    overrides: Sequence[str] = (),
    store: Path | None = None,
    workers: int | None = None,
    engine: str = "local",
    stages: Watch | None = None,
    on_preliminary: OnPreliminary | None = None,
) -> PlanResult | JobPlan:
    """Plan the scenario at `path` (name or file) by its `plan` block or the defaults; a job if the objective says so.

    overrides: as `--set` takes them
    store:     file that caches points, so a stopped plan resumes; default: the user's
    workers, engine: see `perfmodel.planning.sweep`
    stages:    stage name -> progress display
    on_preliminary: called with the screen's result before simulating

    Raises SpecError for a scenario without an SLO or a rate, or with an error."""
    base = Base(path, tuple(overrides))
    scenario = base.load()
    spec = block_as(scenario.plan, PlanSpec) or PlanSpec()
    if spec.is_offline and (spec.space.encoders or encode_pool(scenario) is not None):
        raise SpecError(
            "plans of jobs size no encode pools: leave these out, or simulate sizes by --set cluster.pools."
        )
    if spec.objective == "carbon" and (scenario.site is None or scenario.site.grid_gco2_per_kwh is None):
        raise SpecError("plan.objective=carbon without a grid: set site.region, as in DE, or site.gco2_per_kwh.")
    if any(kind.weight != 1 for kind in scenario.traffic.classes):
        raise SpecError("plans choose replicas without a gateway's vtc; leave the weight of traffic.classes out.")
    file = store or default_store()
    Store(file).close()  # fail before the search if the file is unusable
    rate, plan = (0.0, plan_job) if spec.is_offline else (wanted_rate(scenario, spec), _plan_rate)
    run = Runs(base, scenario, spec, rate, StoredSweep(str(file), workers, engine))
    return plan(run, stages or (lambda _: nullcontext()), on_preliminary or (lambda _: None))


def _plan_rate(run: Runs, stages: Watch, on_preliminary: OnPreliminary) -> PlanResult:
    scenario, spec, rate, quantile = run.scenario, run.spec, run.rate, quantile_name(run.spec.attainment)
    with stages("screening"):
        space = enumerate_space(run.base, spec)
        screen = Screen(space.candidates, scenario, spec.attainment)
        screened = screen.all()
        serving = choice.with_tightness(screen, choice.deployed(screened, spec, rate), rate)
        serving.sort(key=lambda deployment: choice.objective_key(deployment, spec))
        front = choice.screened_front(screen, serving, spec, rate)
    chosen = choice.with_every_device(choice.finalists(serving, spec), serving, spec)
    on_preliminary(fin.Preliminary(spec, len(space.candidates), chosen, rate))
    able = {id(deployment.screened) for deployment in serving}
    cut = [*serving, *(Deployment(candidate, 0) for candidate in screened if id(candidate) not in able)]
    with stages("simulating the finalists' requests") as progress:
        run = run.counted(progress)
        run.sweep.forecast.expect(_FRONT, run.num_requests([(deployment, deployment.replicas) for deployment in front]))
        done, num_left = _settled(run, chosen, cut)
        # Latencies are drawn as near to the highest rate of the closed form as the wanted rate is to the simulated one.
        near = [rate * one.screened.rate / max(one.rate, 1e-9) for one in done]
        drawn = screen.under_draws([one.screened for one in done], near)
        sized = _sized(run, [replace(one, drawn=factors) for one, factors in zip(done, drawn, strict=True)])
        simulated = _with_front(run, screen, done, front)
    serve, do_not = choice.simulated_front(simulated, front, spec, scenario.slo, quantile)
    good, bad = _judged(sized, scenario, spec)
    result = replace(
        _draft(run, good, bad),
        num_candidates=space.num_all,
        num_able=len(serving),
        ruled_out=dict(space.ruled_out) | choice.shortfalls(screened, spec, rate),
        front=serve,
        not_serving=do_not,
        nearest="" if serving else _nearest(screened, rate),
        searched=space.searched,
        ratios=_ratios(run, done),
        num_overlooked=num_left,
        left_out=left_out(scenario),
    )
    result = _completed(_ordered(result), simulated)
    judged = result.ranked, result.missed
    result = replace(result, devices=choice.device_answers(spec, rate, judged, serving, screened, space.by_device))
    if (winner := result.winner) is None:
        return result
    with stages("under failures"):
        result = replace(result, resilience=under_failures(result, winner))
    with stages("over the load"):
        return replace(result, elasticity=over_the_load(result, winner))


def _settled(run: Runs, chosen: Sequence[Deployment], cut: Sequence[Deployment]) -> tuple[list[Finalist], int]:
    """Simulate `chosen` and those of `cut` that may be better; also returns how many of these were left out."""
    spec, done = run.spec, run.settled(chosen)
    tried = {id(deployment.screened) for deployment in chosen}
    room = ceil(spec.finalists / 2)
    while True:
        draft = _draft(run, *_judged(done, run.scenario, spec))
        sign = 1.0 if draft.is_better_low else -1.0
        best = min((sign * draft.figure(finalist) for finalist in draft.ranked), default=None)
        rest = [deployment for deployment in cut if id(deployment.screened) not in tried]
        better = choice.overlooked(rest, best, _ratios(run, done), spec, run.rate)
        more = better[:room]
        if not more:
            return done, len(better)
        room -= len(more)
        tried |= {id(deployment.screened) for deployment in more}
        done += run.settled(more)


def _draft(run: Runs, ranked: Sequence[Finalist], missed: Sequence[Finalist] = ()) -> PlanResult:
    return PlanResult(run.base, run.scenario, run.spec, ranked=ranked, missed=missed, rate=run.rate)


def _ratios(run: Runs, done: Sequence[Finalist]) -> choice.Ratios:
    return choice.ratios_of(done, run.scenario.slo, quantile_name(run.spec.attainment))


def _judged(done: Sequence[Finalist], scenario: Scenario, spec: PlanSpec) -> tuple[list[Finalist], list[Finalist]]:
    good = [finalist for finalist in done if fin.meets(finalist.records, scenario.slo, spec.attainment)]
    return good, [finalist for finalist in done if finalist not in good]


def _sized(run: Runs, done: Sequence[Finalist]) -> list[Finalist]:
    """Finalists with replicas that suffice in the requested share of draws (at most those allowed), simulated."""
    if run.spec.objective == "lowest_latency":
        return list(done)
    draft, sized = _draft(run, [], done), list(done)
    more = {}
    for place, finalist in enumerate(done):
        option = draft.option(finalist)
        counts = range(finalist.replicas, option.most + 1)
        allowed = [count for count in counts if choice.may_have(finalist.candidate, run.spec, count)]
        if (enough := option.enough(allowed, run.spec.confidence)) != finalist.replicas:
            more[place] = enough
    records = run.at_rate([(done[place], count) for place, count in more.items()])
    for (place, count), known in zip(more.items(), records, strict=True):
        sized[place] = sized[place].sized(count, known)
    return sized


def _ordered(result: PlanResult) -> PlanResult:
    """The choice, then others that reach the confidence by expected cost (or the objective, if that is no cost)."""
    if not result.ranked:
        return result
    options = [result.option(finalist) for finalist in result.everyone]
    first = fin.pick(options[: len(result.ranked)], result.spec.confidence)
    expected = fin.certainty_of(options, first, result.spec.confidence).expected

    def key(place: int) -> tuple[bool, bool, float, float]:
        option = options[place]
        figure = expected[option.name] if option.figure is None else option.figure
        return place != first, option.share < result.spec.confidence, figure, -result.ranked[place].rate

    return replace(result, ranked=[result.ranked[place] for place in sorted(range(len(result.ranked)), key=key)])


def _with_front(run: Runs, screen: Screen, done: Sequence[Finalist], front: Sequence[Deployment]) -> Simulated:
    """All deployments simulated at the rate, including the front, by label."""
    simulated = [(Deployment(one.screened, n), known) for one in done for n, known in one.runs.items()]
    labels = {deployment.label for deployment, _ in simulated}
    missing = [deployment for deployment in front if deployment.label not in labels]
    run.sweep.forecast.expect(_FRONT, 0)
    records = run.at_rate([(deployment, deployment.replicas) for deployment in missing])
    by_label = {whole.label: (whole, known) for whole, known in (*simulated, *zip(missing, records, strict=True))}
    deployments = choice.with_tightness(screen, [whole for whole, _ in by_label.values()], run.rate)
    return {one.label: (one, known) for one, (_, known) in zip(deployments, by_label.values(), strict=True)}


def _completed(result: PlanResult, simulated: Simulated) -> PlanResult:
    winner = result.winner
    if winner is None:
        return result
    traffic = at_rate(result.scenario, result.rate, _REQUESTS)
    choices = as_overrides({**winner.candidate.choices(winner.replicas), **traffic})
    run = simulate(result.base.load(choices), keep_steps=False)
    notes = [*run.notes, *choice.origin_notes(winner.screened.origin)]
    if result.scenario.traffic.arrivals.process == "trace":
        notes.append("Arrivals are the trace's own, at other rates the same with longer or shorter gaps.")
    notes += winner.notes
    fewer = {
        label: fin.attained(records)
        for label, (deployment, records) in simulated.items()
        if deployment.screened is winner.screened and deployment.replicas < winner.fewest
    }
    notes = list(dict.fromkeys([*notes, *_prices(result)]))
    chosen = Deployment(winner.screened, winner.replicas)
    mixes = mix_answers(result.scenario, chosen, result.spec.attainment)
    return replace(result, bound_share=device_shares(run.summary), notes=notes, fewer=fewer, mixes=mixes)


def _prices(result: PlanResult) -> Iterator[str]:
    scenarios = [layout.scenario for finalist in result.everyone for layout, _ in finalist.candidate.counts]
    devices = dict.fromkeys(scenario.hardware.name for scenario in scenarios)
    price = result.scenario.price
    if price is not None and isinstance(price.usd_per_gpu_hour, float) and len(devices) > 1:
        yield (
            f"price.usd_per_gpu_hour {price.usd_per_gpu_hour:g} of the scenario is that of every device here, "
            f"{', '.join(devices)}; give each its own, as in --price {next(iter(devices))}=2.50."
        )
    yield from choice.compared_prices(scenarios)


def _nearest(screened: Sequence[Screened], rate: float) -> str:
    """The deployment with the fewest devices that would serve the rate if they were allowed."""
    if not screened:
        return "None of the candidates can run, for the reasons below; widen plan.space accordingly."
    best = max(screened, key=lambda candidate: candidate.rate_per_device)
    if best.rate <= 0:
        return "No candidate meets the SLO even for a single user; relax it, or add faster devices to plan.space."
    count, size = ceil(rate / best.rate - 1e-9), best.candidate.num_devices
    return (
        f"The highest rate per device is that of {best.candidate.label}, {best.rate:.3g} requests/s on {size}; {count} "
        f"of them, {fin.gpus_text(count * size)}, would suffice."
    )
