"""A plan as a document, at a rate or of an offline job: the choice in sentences, finalists, commands, pictures.

`plan_view` and `job_view` have all of it; `brief_view` is one screen: the choice, at most six options, why not a
cheaper one, the command, how far to trust it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import isfinite
from typing import Any, TypeVar

from perfmodel.planning.choice import DeviceAnswer
from perfmodel.planning.export import batch_command, serve_commands
from perfmodel.planning.finalist import Finalist, FrontPoint, Interval, Job, Preliminary, Replicas, gpus_text
from perfmodel.planning.metrics import ALTERNATIVES, metric_of
from perfmodel.planning.points import shares_text
from perfmodel.planning.result import JobPlan, PlanResult
from perfmodel.planning.space import NO_PRICE
from perfmodel.report.document import Block, Commands, Document, Line, Notes, Paragraph, Plot, Sentences, Span, Table
from perfmodel.report.drawing.charts import Bar, bars_figure
from perfmodel.report.drawing.figures import COLOURS, Figure
from perfmodel.report.numbers import (
    MISSING,
    format_duration,
    format_metric,
    format_number,
    format_optional,
    format_short,
)
from perfmodel.report.plots.whatif import front_plot
from perfmodel.report.views.elastic import changed_sentences, changed_tables, fleet_plots
from perfmodel.report.views.run import alternatives_sentences
from perfmodel.report.views.scenario import trust_blocks, trust_line

Row = TypeVar("Row")
Columns = Sequence[tuple[str, Callable[[Row], Line]]]  # (title, the cell of a row)

_HOURS_PER_MONTH = 730  # a year's, over twelve
_LITTLE = 0.01  # of the choice's expected cost: what a measurement has to be worth to be named
_NUM_OPTIONS = 6
OBJECTIVES = {
    "cheapest": "USD per hour",
    "fewest_gpus": "GPUs",
    "goodput_per_gpu": "requests/s under the SLO per GPU",
    "lowest_latency": "latency over its limit",
    "joules": "W of all devices",
    "carbon": "g CO2 per hour",
}
_SERVICE_NOTE = (
    "Maximum rate: at which {:.0%} of the requests meet the SLO, of the whole deployment under {} seeds; latencies "
    "and attainment are at the target rate. In brackets: 80 % intervals, of what calibrations leave unexplained and of "
    "the seeds. suffices: the share of draws in which so many replicas serve the target rate ({:.0%} are asked for). "
    "choice better: the share of draws in which the first row is better, each bought by what it turns out to need. "
    "binds: what is missed first beyond the maximum rate."
)
_COSTS_NOTE = (
    "expected: the cost with the replicas that draws add; finalists are ranked by it. Prefill and decode cost: the "
    "total cost split by the time that steps of prompts and answers take. Energy per output token: all of it."
)
_FRONT_NOTE = (
    "Of all deployments that were simulated at the target rate, those that no cheaper one beats in latency over its "
    "limit. ratio: simulated over closed form. misses: serves the rate in closed form only."
)
_JOB_NOTE = (
    "The whole job under {} seeds; in brackets 80 % intervals, of what calibrations leave unexplained and of the "
    "seeds. in time: the share of draws in which the deadline is met. choice better: the share in which the first row "
    "is. ratio: simulated over closed form. Long jobs are extrapolated from the steady pace of shorter ones."
)


def _table(columns: Columns[Row], rows: Iterable[Row], title: str, note: str = "", **layout: Any) -> Table:
    cells = [tuple(cell(row) for _, cell in columns) for row in rows]
    return Table([head for head, _ in columns], cells, title, note=note, **layout)


def _title(key: str) -> str:
    return metric_of(key).title


def _document(plan: PlanResult | JobPlan, blocks: list[Block], question: str, command: str = "") -> Document:
    return Document(f"Plan: {plan.scenario.name}", blocks, question, "plan", command)


def _searched(plan: PlanResult | JobPlan, counts: Sequence[str]) -> Sentences:
    reasons = (f"{count:,} {reason}" for reason, count in plan.ruled_out.items())
    return Sentences([*counts, *reasons], "What was searched")


def plan_view(result: PlanResult, command: str = "") -> Document:
    """The answer, pictures, tables, commands, what was searched, notes."""
    blocks: list[Block] = [Sentences(plan_sentences(result))]
    if result.everyone:
        title = f"{result.scenario.name}: finalists, best first [80 % intervals]"
        blocks.append(Plot(title, partial(_finalists_drawn, result), name="finalists"))
    if len(result.front) > 1:
        title = f"{result.scenario.name}: cost and latency at {result.rate:g} requests/s, simulated"
        blocks.append(Plot(title, lambda: front_plot(result.to_json()), "Numbers are those of the table.", "front"))
    tables = [_devices(result), *_finalists(result), _front(result), *changed_tables(result)]
    blocks += [*(table for table in tables if table.rows), *trust_blocks(result.trust)]
    blocks += fleet_plots(result)
    if result.winner is not None:
        blocks.append(Commands("To start it", serve_commands(result, result.winner)))
    counts = [f"{result.num_candidates:,} candidates", f"{result.num_able:,} serve the rate in closed form"]
    blocks.append(_searched(result, [*(f"{name}: {values}" for name, values in result.searched.items()), *counts]))
    left_out = [f"Not carried into the plan: {setting}." for setting in result.left_out]
    blocks.append(Notes([*_unpriced(result), *left_out, *result.notes]))
    return _document(result, blocks, plan_question(result), command)


def plan_json(result: PlanResult) -> dict[str, Any]:
    """All that the sentences and the tables say, and what each finalist's simulations gave."""
    return {**result.to_json(), "answer": plan_sentences(result)}


def plan_question(result: PlanResult) -> str:
    """What the plan answers, as a sentence."""
    wanted = result.scenario.slo.in_words(result.spec.attainment, "them")
    return (
        f"What serves {result.scenario.model.name} at {result.rate:g} requests/s, {wanted}, best by "
        f"{OBJECTIVES[result.spec.objective]}, on at most {gpus_text(result.spec.max_gpus)}?"
    )


def plan_sentences(result: PlanResult) -> list[str]:
    """The choice, how sure it is, and what no table has."""
    spec, winner, slo = result.spec, result.winner, result.scenario.slo
    share = f"{spec.attainment:.0%} of them" if slo.is_of_requests else "their statistics"
    also = " and their statistics met" if slo.is_of_requests and slo.statistics else ""
    wanted = f"{result.rate:g} requests/s with {share} within the SLO{also}"
    if winner is None:
        return [f"Nothing within {gpus_text(spec.max_gpus)} serves {wanted}. {result.nearest}".strip()]
    cost = gpus_text(winner.num_devices)
    if (usd := winner.usd_per_hour) is not None:
        cost += f", {usd:.2f} USD per hour, {usd * _HOURS_PER_MONTH:,.0f} USD per month"
    low, high = _ends(winner.rate_interval, format_short)
    return [
        f"Take {winner.label}: {cost}, for {wanted}.",
        *_certainty(result),
        f"It serves up to {format_short(winner.rate)} requests/s (80 % interval {low} to {high}), "
        f"{winner.rate / result.rate - 1:+.0%} against the target; {winner.screened.binds} binds beyond.",
        *(
            f"One replica fewer misses the SLO: {label}, simulated, with {share:.1%} of requests within it."
            for label, share in result.fewer.items()
        ),
        *_under_failures(result, winner),
        *changed_sentences(result, winner),
        *_energy(result, winner),
        *alternatives_sentences({name: winner.mean(name) for name in ALTERNATIVES}),
        *_bound(result),
    ]


def _energy(result: PlanResult, winner: Finalist) -> Iterator[str]:
    """What the choice draws and emits, where that is the objective, and what the cheapest that serves would."""
    if result.spec.objective not in ("joules", "carbon"):
        return

    def drawn(option: Finalist) -> str:
        grams = f", {option.gco2_per_hour:.4g} g CO2 per hour" if isfinite(option.gco2_per_hour) else ""
        return f"{option.power_w:.4g} W, {option.mean('joules_per_output_token') or 0.0:.3g} J per output token{grams}"

    cheapest = min(result.ranked, key=lambda option: option.cost)
    against = "; none that serves is cheaper."
    if cheapest is not winner and cheapest.cost < winner.cost:
        usd = "" if cheapest.usd_per_hour is None else f" for {cheapest.usd_per_hour:.2f} USD per hour"
        against = f"; the cheapest that serves, {cheapest.label}{usd}, draws {drawn(cheapest)}."
    yield f"At the target rate its devices draw {drawn(winner)}{against}"


def _certainty(result: PlanResult) -> Iterator[str]:
    """In how many draws the choice suffices, what that costs, and which measurement would settle it."""
    known = result.certainty
    if known is None:
        return
    is_unpriced = any(finalist.usd_per_hour is None for finalist in result.everyone)
    in_devices = result.spec.objective == "fewest_gpus" or is_unpriced

    def amount(cost: float, form: str) -> str:
        number = format(cost, form)
        return f"{number} {'USD per hour' if not in_devices else 'GPU' if number.lstrip('+-') == '1' else 'GPUs'}"

    line = f"It suffices in {_in_100(known.share)} of what the calibrations leave unexplained"
    if known.is_reached:
        yield f"{line}; {known.confidence:.0%} were asked for (plan.confidence)."
    else:
        yield (
            f"{line}, short of the {known.confidence:.0%} that were asked for (plan.confidence): allow more "
            f"(plan.max_gpus), or measure first."
        )
    name, replicas, cost, share = known.plain
    if known.extra_cost:
        month = "" if in_devices else f", {known.extra_cost * _HOURS_PER_MONTH:,.0f} USD per month"
        yield (
            f"Were predictions exact, {replicas} x {name} would do, for {amount(cost, '.4g')}; these suffice in "
            f"{_in_100(share)}. To be sure costs {amount(known.extra_cost, '+.4g')}{month} against that."
        )
    best = next(iter(known.measurements), None)
    if best is not None and best.value > _LITTLE * next(iter(known.expected.values())):
        price = "" if in_devices else f" ({best.price:.2f} USD for an hour)"
        yield (
            f"What would settle most: measure one replica on {best.device}{price} before the rest is bought. Knowing "
            f"what it serves is worth {amount(best.value, '.3g')} on average, and what is then taken falls short in "
            f"{_in_100(best.short)} instead of {_in_100(1 - known.share)}."
        )


def _in_100(share: float) -> str:
    """`83 of 100 draws`"""
    return f"{min(int(100 * share + 0.5), 100 if share == 1 else 99)} of 100 draws"


def _under_failures(result: PlanResult, winner: Finalist) -> Iterator[str]:
    """What becomes of the choice under the scenario's failures, and how many more replicas that takes."""
    known = result.resilience
    if known is None:
        return
    if not known.attained:
        yield f"The scenario's failures cannot be simulated on the choice: {known.problem}"
        return
    enough = "none of these is enough"
    if known.replicas is not None:
        more = known.replicas - winner.replicas
        enough = f"take {more} more (N+{more})" if more else "as many are enough"
    shares = ", ".join(f"{share:.1%} with {count}" for count, share in known.attained.items())
    yield f"Under the scenario's failures and gateway, requests within the SLO: {shares} replicas; {enough}."
    if known.all_up:
        up = ", ".join(f"{share:.2%} of the time with {count}" for count, share in known.all_up.items())
        yield f"At least {winner.replicas} are up {up}, in closed form."


def _bound(plan: PlanResult | JobPlan) -> list[str]:
    return [f"Device time goes to: {shares_text(plan.bound_share)}."] if plan.bound_share else []


def _unpriced(result: PlanResult) -> list[str]:
    """A sentence on the devices left out for want of a price; empty if there are none."""
    names = [row.device for row in result.devices if NO_PRICE in row.reason]
    if not result.devices and NO_PRICE in result.ruled_out:
        names = [result.scenario.hardware.name]
    if not names:
        return []
    example = ",".join(f"{name}=USD" for name in names)
    return [f"Left out, as no price of it is known: {', '.join(names)}. Give it by --price {example}."]


def _price(finalist: Finalist) -> str:
    """USD per hour, with a star for an unconfirmed price (neither listed nor quoted)."""
    return format_optional(finalist.usd_per_hour, ".2f") + ("*" if finalist.candidate.has_unconfirmed_price else "")


def _starred(title: str, finalists: Iterable[Finalist]) -> str:
    """The title with the legend of the star where `_price` uses one."""
    is_used = any(finalist.candidate.has_unconfirmed_price for finalist in finalists)
    return f"{title}; * an unconfirmed price" if is_used else title


def _ends(interval: Interval, show: Callable[[float], str]) -> list[str]:
    return [show(end) if isfinite(end) else "no end" for end in interval]


def _interval(interval: Interval | None, show: Callable[[float], str]) -> str:
    """`[2.6..7.4]`"""
    return "" if interval is None else f"[{'..'.join(_ends(interval, show))}]"


def _mean(metric: str, form: str) -> Callable[[Finalist | Job], str]:
    return lambda row: format_optional(row.mean(metric), form)


def _better(plan: PlanResult | JobPlan, row: Any) -> str:
    winner: Any = plan.winner
    return "-" if winner is None or row is winner else f"{plan.better_share(winner, row):.0%}"


def _devices(result: PlanResult) -> Table:
    def state(row: DeviceAnswer) -> str:
        return "simulated" if row.is_simulated else "closed form" if row.label else f"none: {row.reason}"

    columns: Columns[DeviceAnswer] = [
        ("device", lambda row: row.device),
        ("its best deployment", lambda row: row.label or "-"),
        (_title("gpus"), lambda row: str(row.num_devices) if row.label else "-"),
        (_title("usd_per_hour"), lambda row: format_optional(row.usd_per_hour, ".2f") if row.label else "-"),
        (_title("max_rate"), lambda row: format_short(row.max_rate) if row.label else "-"),
        ("", state),
    ]
    return _table(columns, result.devices, "Every device asked for", left=2, texts=(5,))


def _finalists(result: PlanResult) -> Iterator[Table]:
    """How finalists serve, what they cost, and their rates in closed form: best first, those that miss the SLO last."""
    quantile, spec, rows = result.quantile, result.spec, result.everyone
    certainty, ratios = result.certainty, result.ratios
    expected = {} if certainty is None else certainty.expected

    def latency(name: str, form: str) -> Callable[[Finalist], str]:
        value, show = _mean(f"{quantile}_{name}_ms", form), partial(format_optional, form=form)
        return lambda row: f"{value(row)} {_interval(row.latency_interval(quantile, name), show)}".strip()

    def priced(row: Finalist) -> str:
        return _price(row) + (
            f" {_interval(result.interval(row), '{:.2f}'.format)}" if spec.objective == "cheapest" else ""
        )

    service: Columns[Finalist] = [
        ("deployment", lambda row: row.label),
        (_title("max_rate"), lambda row: f"{format_short(row.rate)} {_interval(row.rate_interval, format_short)}"),
        (_title(f"{quantile}_ttft_ms"), latency("ttft", ".0f")),
        (_title(f"{quantile}_tpot_ms"), latency("tpot", ".1f")),
        (_title("attained"), lambda row: format_number(100 * row.attained, 1)),
        ("suffices", lambda row: f"{result.sufficient(row):.0%}"),
        ("choice better", partial(_better, result)),
        ("binds", lambda row: row.screened.binds),
    ]
    note = _SERVICE_NOTE.format(spec.attainment, spec.seeds, spec.confidence)
    yield _table(service, rows, "Finalists, simulated: how they serve", note, texts=(len(service) - 1,))
    split = ("usd_per_million_input_tokens_split", "usd_per_million_output_tokens_split", "joules_per_output_token")
    costs: Columns[Finalist] = [
        ("deployment", lambda row: row.label),
        (_title("gpus"), lambda row: str(row.num_devices)),
        ("expected", lambda row: format_optional(expected.get(row.candidate.label), ".2f")),
        (_title("usd_per_hour"), priced),
        *((_title(metric), _mean(metric, ".3g")) for metric in split),
        (_title("rate_per_gpu"), lambda row: format_short(row.rate_per_device)),
    ]
    yield _table(costs, rows, _starred("Finalists, simulated: what they cost", rows), _COSTS_NOTE)
    if ratios is None:
        return
    more = f" {result.num_overlooked:,} more such layouts were not; raise plan.finalists to simulate them."
    note = (
        f"The ratio lies between {ratios.rate[0]:.2f} and {ratios.rate[1]:.2f} before replicas are added for "
        f"uncertainty. A candidate that would be better than the best finalist with a ratio of {ratios.rate[1]:.2f} is "
        f"simulated, too.{more if result.num_overlooked else ''}"
    )
    rates: Columns[Finalist] = [
        ("deployment", lambda row: row.label),
        ("closed form, req/s", lambda row: format_short(row.capacity)),
        ("simulated, req/s", lambda row: format_short(row.rate)),
        ("ratio", lambda row: f"{row.rate / row.capacity:.2f}"),
    ]
    yield _table(rates, rows, "Maximum rate: closed form and simulation", note)


def _front(result: PlanResult) -> Table:
    rows = [(str(number), point) for number, point in enumerate(result.front, 1)]
    rows += [("misses", point) for point in result.not_serving]

    def ratio(point: FrontPoint) -> str:
        known = point.screened_tightness
        return format_optional(point.tightness / known if isfinite(known) and known else None, ".2f")

    columns: Columns[tuple[str, FrontPoint]] = [
        ("", lambda row: row[0]),
        ("deployment", lambda row: row[1].label),
        (_title("gpus"), lambda row: str(row[1].num_devices)),
        (_title("usd_per_hour"), lambda row: format_optional(row[1].usd_per_hour, ".2f")),
        (_title("tightness"), lambda row: f"{row[1].tightness:.2f}"),
        (_title("screened_tightness"), lambda row: f"{row[1].screened_tightness:.2f}".replace("inf", "no end")),
        ("ratio", lambda row: ratio(row[1])),
        (_title("attained"), lambda row: format_number(100 * row[1].attained, 1)),
    ]
    rows = rows if len(result.front) > 1 or result.not_serving else []
    return _table(columns, rows, "What a higher budget buys, simulated", _FRONT_NOTE, left=2)


def _finalists_drawn(result: PlanResult) -> Figure:
    """A bar for each, the choice in another colour, those that miss the SLO at the end."""
    bars = []
    for place, finalist in enumerate(result.everyone):
        figure, interval = result.figure(finalist), result.interval(finalist)
        colour = COLOURS[0 if finalist is result.winner else 1]
        name = finalist.label if place < len(result.ranked) else f"{finalist.label} (misses the SLO at the target rate)"
        bars.append(Bar(name, figure, colour, f"{format_short(figure)} {_interval(interval, format_short)}", interval))
    return bars_figure(bars, OBJECTIVES[result.spec.objective])


def preliminary_sentence(preliminary: Preliminary) -> str:
    """How many candidates are being simulated, and the best one in closed form."""
    candidates = f"{preliminary.num_candidates:,} candidates"
    if not preliminary.finalists:
        if preliminary.rate is not None:
            return f"In closed form none of {candidates} serves {preliminary.rate:g} requests/s."
        limit = gpus_text(preliminary.spec.max_gpus)
        return f"In closed form nothing within {limit} does {preliminary.num_requests:,} requests."
    best = preliminary.finalists[0]
    taken = f" in {format_duration(best.seconds)}" if isinstance(best, Job) else ""
    label = f"{_short_label(best)}{taken}"
    return f"Simulating {len(preliminary.finalists)} of {candidates}; the best in closed form is {label}."


def brief_view(result: PlanResult, question: str) -> Document:
    """The answer for a terminal; `plan_view` has all of it (`--details`)."""
    winner = result.winner
    if winner is None:
        reasons = [f"{count:,} candidates: {reason}" for reason, count in result.ruled_out.items()]
        return _document(result, [Sentences([*plan_sentences(result), *reasons, *_unpriced(result)])], question)
    choice = [gpus_text(winner.num_devices)]
    if winner.usd_per_hour is not None:
        mark = " (unconfirmed)" if winner.candidate.has_unconfirmed_price else ""
        choice.append(f"{winner.usd_per_hour:.2f} USD/h{mark}")
    choice.append(f"{result.sufficient(winner):.0%} sure")
    blocks: list[Block] = [Paragraph((Span(f"{_short_label(winner)}: {', '.join(choice)}", "strong"),))]
    more = [*winner.notes, _why_not_cheaper(result, winner), *changed_sentences(result, winner), *_unpriced(result)]
    blocks += [_options(result, winner), *map(Paragraph, more)]
    blocks += [Commands("To start it", serve_commands(result, winner)), *trust_line(result.trust)]
    if notes := result.scenario.model.encoder_notes:
        blocks.append(Notes(notes))
    blocks += _assumed(result, winner)
    choices = f" ({', '.join(result.searched)})" if result.searched else ""
    searched = f"{result.num_candidates:,} candidates searched{choices}, {len(result.everyone)} simulated."
    blocks.append(Paragraph(f"{searched} All sentences, tables and notes: --details, --report FILE or --json."))
    return _document(result, blocks, question)


def _assumed(result: PlanResult, winner: Finalist) -> list[Block]:
    """The assumed acceptance of the winner's drafts, unless the scenario or the search space gives it."""
    is_given = result.scenario.engine.speculative_config is not None or bool(result.spec.space.speculation)
    if winner.candidate.layout.scenario.engine.speculative_config is None or is_given:
        return []
    return [Paragraph(f"Assumed: speculation is {result.searched['speculation']}.")]


def _short_label(option: Replicas) -> str:
    split = option.candidate.split.replace(" to ", " : ")
    return f"{option.replicas} x {option.candidate.layout.label}{split and f', {split}'}"


def _options(result: PlanResult, winner: Finalist) -> Table:
    """The choice, the next ones by rank, and the cheapest one even if it is not sure enough."""
    quantile = result.quantile
    cheapest = min(result.everyone, key=lambda option: option.cost)
    distinct: dict[tuple[str, int], Finalist] = {}  # token budgets have no column
    for option in result.ranked:
        distinct.setdefault((_short_label(option), option.candidate.max_num_seqs), option)
    options = list(distinct.values())[:_NUM_OPTIONS]
    if all(option is not cheapest for option in options):
        options = [*options[: _NUM_OPTIONS - 1], cheapest]

    def label(option: Finalist) -> Line:
        text = _short_label(option)
        return Span(f"> {text}", "strong") if option is winner else f"  {text}"

    columns: Columns[Finalist] = [
        ("  deployment", label),
        ("seqs", lambda option: str(option.candidate.max_num_seqs)),
        ("GPUs", lambda option: str(option.num_devices)),
        ("USD/h", _price),
        (f"{quantile} TTFT", _mean(f"{quantile}_ttft_ms", ".0f")),
        (f"{quantile} TPOT", _mean(f"{quantile}_tpot_ms", ".1f")),
        ("max req/s", lambda option: format_short(option.rate)),
        ("sure", lambda option: f"{result.sufficient(option):.0%}"),
        ("USD/M out", _mean("usd_per_million_output_tokens_split", ".3g")),
    ]
    columns = [(head, cell) for head, cell in columns if any(cell(option) != MISSING for option in options)]
    return _table(columns, options, _starred("Options (latencies in ms)", options))


def _why_not_cheaper(result: PlanResult, winner: Finalist) -> str:
    """Why the surest of the cheaper options was not chosen."""
    missed = {id(option) for option in result.missed}
    cheaper = [option for option in result.everyone if option.cost < 0.995 * winner.cost]
    if not cheaper:
        return "No simulated option is cheaper."
    best = min(cheaper, key=lambda option: (id(option) in missed, -result.sufficient(option), option.cost))
    share, spec = result.sufficient(best), result.spec
    reason = f"with the replicas that draws add it is expected to cost more (it suffices in {share:.0%} of them)"
    if id(best) in missed:
        reason = f"only {best.attained:.0%} of requests meet the SLO at this rate"
    elif share < spec.confidence:
        reason = f"it suffices in {share:.0%} of the draws, plan.confidence asks for {spec.confidence:.0%}"
    elif spec.objective != "cheapest":
        figures = f"{result.figure(best):.4g} against {result.figure(winner):.4g}"
        reason = f"the objective is {OBJECTIVES[spec.objective]}, {figures}"
    price = "" if best.usd_per_hour is None else f" for {best.usd_per_hour:.2f} USD/h"
    return f"Why not {_short_label(best)}{price}: {reason}."


def job_view(plan: JobPlan, command: str = "") -> Document:
    """The answer, the finalists, the command, what was searched, notes."""
    blocks: list[Block] = [Sentences(_job_sentences(plan)), _job_table(plan), *trust_blocks(plan.trust)]
    if plan.winner is not None:
        blocks.append(Commands("To start it", batch_command(plan, plan.winner)))
    counts = [f"{plan.num_candidates:,} candidates", f"{plan.num_able:,} in time in closed form"]
    best = "at the lowest cost" if plan.spec.objective == "cheapest_job" else "first"
    job = f"{plan.num_requests:,} requests to {plan.scenario.model.name}{_within(plan)}"
    question = f"Which deployment completes {job} {best}, on at most {gpus_text(plan.spec.max_gpus)}?"
    return _document(plan, [*blocks, _searched(plan, counts), Notes(plan.notes)], question, command)


def job_json(plan: JobPlan) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {**plan.to_json(), "answer": _job_sentences(plan)}


def _within(plan: JobPlan) -> str:
    return "" if plan.spec.deadline_s is None else f" within {format_duration(plan.spec.deadline_s)}"


def _job_sentences(plan: JobPlan) -> list[str]:
    """The answer, how sure it is to be in time, and what that costs."""
    winner, job = plan.winner, f"{plan.num_requests:,} requests"

    def done(job: Job) -> str:
        taken, low, high = map(format_duration, (job.seconds, *job.seconds_interval))
        return f"done in {taken} (80 % interval {low} to {high})"

    def bill(job: Job) -> str:
        return f", {job.bill:.3g} GPU hours" if job.usd_per_hour is None else f", for {job.bill:.3g} USD"

    if winner is None:
        nearest = min(plan.missed, key=lambda late: late.seconds, default=None)
        answer = f"Nothing within {gpus_text(plan.spec.max_gpus)} does {job}{_within(plan)}."
        return [answer if nearest is None else f"{answer} First would be {nearest.label}, {done(nearest)}."]
    devices = gpus_text(winner.num_devices)
    devices += "" if winner.usd_per_hour is None else f", {winner.usd_per_hour:.2f} USD per hour"
    lines = [f"Take {winner.label}: {devices}; {job} are {done(winner)}{bill(winner)}."]
    deadline, share, wanted = plan.spec.deadline_s, plan.in_time(winner), plan.spec.confidence
    if deadline is None:
        return [*lines, *_bound(plan)]
    line = (
        f"The deadline of {format_duration(deadline)} leaves {deadline / winner.seconds - 1:.0%} to spare; it is met "
        f"in {_in_100(share)} of what the calibrations leave unexplained"
    )
    plain = plan.plain
    if share < wanted:
        lines.append(
            f"{line}, which is short of the {wanted:.0%} that were asked for (plan.confidence): no finalist does "
            f"better within what is allowed. {plan.replicas_for_sure(winner, wanted)} replicas, in proportion, would."
        )
    else:
        lines.append(f"{line}; {wanted:.0%} were asked for (plan.confidence).")
        if plain is not None and plain.label != winner.label:
            in_time = _in_100(plan.in_time(plain))
            lines.append(f"Were predictions exact, {plain.label} would do{bill(plain)}; it is in time in {in_time}.")
    return [*lines, *_bound(plan)]


def _job_table(plan: JobPlan) -> Table:
    """The finalists, best first, late ones at the end."""

    def duration(job: Job) -> str:
        taken, low, high = map(format_duration, (job.seconds, *job.seconds_interval))
        return f"{taken} [{low}..{high}]"

    columns: Columns[Job] = [
        ("deployment", lambda job: job.label),
        (_title("gpus"), lambda job: str(job.num_devices)),
        (metric_of("duration").name, duration),
        (_title("usd_total"), lambda job: "-" if job.usd_per_hour is None else f"{job.bill:.3g}"),
        (_title("output_throughput_per_gpu"), _mean("output_throughput_per_gpu", ",.0f")),
        (_title("usd_per_million_output_tokens"), _mean("usd_per_million_output_tokens", ".3g")),
        (_title("tail_share"), lambda job: format_metric(metric_of("tail_share"), job.mean("tail_share"))),
        ("in time", lambda job: f"{plan.in_time(job):.0%}"),
        ("choice better", partial(_better, plan)),
        ("closed form", lambda job: format_duration(job.screened_s)),
        ("ratio", lambda job: f"{job.seconds / job.screened_s:.2f}"),
    ]
    return _table(columns, plan.everyone, "Finalists, simulated", _JOB_NOTE.format(plan.spec.seeds))
