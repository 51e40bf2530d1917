"""A plan in sentences: what to deploy, what it costs, who comes next, how sure that is."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf, isfinite
from typing import Any

from perfmodel.planning.choice import DeviceAnswer
from perfmodel.planning.export import serve_commands
from perfmodel.planning.finalist import (
    Certainty,
    Finalist,
    FrontPoint,
    Interval,
    Job,
    Measurement,
    Preliminary,
    PreliminaryJob,
)
from perfmodel.planning.metrics import metric_of
from perfmodel.planning.points import shares_text
from perfmodel.planning.result import SURE, JobPlan, PlanResult, batch_command
from perfmodel.planning.space import NO_PRICE
from perfmodel.report.document import Block, Commands, Document, Line, Notes, Paragraph, Picture, Sentences, Span, Table
from perfmodel.report.drawing.charts import Bar, Dot, bars_svg, pareto_svg
from perfmodel.report.drawing.svg import COLOURS
from perfmodel.report.numbers import format_duration, format_metric, format_number, format_optional
from perfmodel.report.views.trust import trust_blocks, trust_line

_HOURS_PER_MONTH = 730  # a year's, over twelve
_LITTLE = 0.01  # of the choice's expected cost: what a measurement has to be worth to be named
OBJECTIVES = {
    "cheapest": "USD per hour",
    "fewest_gpus": "GPUs",
    "goodput_per_gpu": "requests/s under the SLO per GPU",
    "lowest_latency": "latency over its limit",
}
_BINDS = {
    "ttft": "the time to the first token",
    "tpot": "the time per output token",
    "itl": "the time between tokens",
    "max_itl": "the longest gap between tokens",
    "reading": "the reader's speed",
    "e2el": "the end-to-end latency",
    "KV cache": "memory (the KV cache holds no more sequences)",
    "max_num_seqs": "max_num_seqs",
}


def plan_sentences(result: PlanResult) -> list[str]:
    """The answer in sentences."""
    spec, winner = result.spec, result.winner
    slo = result.scenario.slo
    share = f"{spec.attainment:.0%} of them" if slo.is_of_requests else "their statistics"
    also = " and their statistics met" if slo.is_of_requests and slo.statistics else ""
    wanted = f"{result.rate:g} requests/s with {share} within the SLO{also}"
    if winner is None:
        return [f"Nothing within {spec.max_gpus} GPUs serves {wanted}. {result.nearest}".strip(), *_near_misses(result)]
    lines = [f"Take {winner.label}: {_cost(winner)}, for {wanted}.", *certainty_sentences(result)]
    tokens = _tokens(winner)
    if tokens:
        lines.append(f"At that rate it comes to {tokens}.")
    low, high = winner.rate_interval
    lines.append(
        f"It serves up to {winner.rate:.3g} requests/s (80 % interval {low:.3g} to {high:.3g}), "
        f"{winner.rate / result.rate - 1:+.0%} against the target; beyond that, "
        f"{_BINDS[winner.deployment.screened.binds]} binds first."
    )
    lines += _reserve(result)
    lines += _under_failures(result)
    lines += bound_sentence(result.bound_share)
    lines += _comparison(result, winner)
    return lines


def certainty_sentences(result: PlanResult) -> list[str]:
    """In how many draws the choice suffices, what that costs, and which measurement would settle it."""
    found = result.certainty
    if found is None:
        return []
    unit = "GPUs" if _is_in_devices(result) else "USD per hour"
    return [_sure(found), *_costs(found, unit), *_settled(result, found, unit)]


def in_100(share: float) -> str:
    """`83 of 100 draws`"""
    return f"{min(int(100 * share + 0.5), 100 if share == 1 else 99)} of 100 draws"


def _sure(found: Certainty) -> str:
    line = f"It suffices in {in_100(found.share)} of what the calibrations leave unexplained"
    if found.is_reached:
        return f"{line}; {found.confidence:.0%} were asked for (plan.confidence)."
    return (
        f"{line}, which is short of the {found.confidence:.0%} that were asked for (plan.confidence): no finalist does "
        f"better within what is allowed, so allow more (plan.max_gpus), or measure first."
    )


def _costs(found: Certainty, unit: str) -> list[str]:
    """What being sure costs, and the expected cost with its price of missing the SLO."""
    lines = []
    name, replicas, cost, share = found.plain
    if found.extra_cost:
        is_usd = unit == "USD per hour"
        month = f", {found.extra_cost * _HOURS_PER_MONTH:,.0f} USD per month" if is_usd else ""
        lines.append(
            f"Were predictions exact, {replicas} x {name} would do, for {cost:.4g} {unit}; these suffice in "
            f"{in_100(share)}. To be sure costs {found.extra_cost:+.4g} {unit}{month} against that."
        )
    chosen = next(iter(found.expected.values()))
    cheapest = min(found.expected, key=lambda each: found.expected[each])
    line = (
        f"Expected cost: {chosen:.4g} {unit}, where missing the SLO is priced as the replicas that are then added, at "
        f"most {found.cap:.4g} (the surest of the finalists)"
    )
    less = chosen - found.expected[cheapest]
    lines.append(f"{line}; {cheapest} expects {less:.3g} less." if less > _LITTLE * chosen else f"{line}.")
    return lines


def _settled(result: PlanResult, found: Certainty, unit: str) -> list[str]:
    best: Measurement | None = next(iter(found.measurements), None)
    chosen = next(iter(found.expected.values()))
    if best is None or best.value <= _LITTLE * chosen:
        return ["No measurement of one device would change the expected cost by as much as a hundredth."]
    price = "" if _is_in_devices(result) else f" ({best.price:.2f} USD for an hour)"
    return [
        f"What would settle most: measure one replica on {best.device}{price} before the rest is bought. Knowing what "
        f"it serves is worth {best.value:.3g} {unit} on average, and what is then taken falls short in "
        f"{in_100(best.short)} instead of {in_100(1 - found.share)}."
    ]


def _is_in_devices(result: PlanResult) -> bool:
    """Whether costs are counted in devices: where that is the objective, or where no price is known."""
    everyone = (*result.ranked, *result.missed)
    return result.spec.objective == "fewest_gpus" or any(each.usd_per_hour is None for each in everyone)


def preliminary_sentence(preliminary: Preliminary) -> str:
    """How many candidates are being simulated, and the best one in closed form."""
    if not preliminary.finalists:
        return (
            f"In closed form none of {preliminary.num_candidates:,} candidates serves {preliminary.rate:g} requests/s."
        )
    best = preliminary.finalists[0]
    label = f"{best.replicas} x {best.screened.candidate.layout.label}"
    count = f"{len(preliminary.finalists)} of {preliminary.num_candidates:,} candidates"
    return f"Simulating {count}; the best in closed form is {label}."


def _reserve(result: PlanResult) -> list[str]:
    """What fewer replicas than the fewest that serve come to."""
    return [
        f"One replica fewer misses the SLO: {label}, simulated, with {share:.1%} of requests within it."
        for label, share in result.fewer.items()
    ]


def _under_failures(result: PlanResult) -> list[str]:
    """What becomes of the choice under the scenario's failures, and how many more replicas that takes."""
    found, winner = result.resilience, result.winner
    if found is None or winner is None:
        return []
    if not found.attained:
        return [f"The scenario's failures cannot be simulated on the choice: {found.problem}"]
    shares = ", ".join(f"{share:.1%} with {count}" for count, share in found.attained.items())
    line = f"Under the scenario's failures and gateway, requests within the SLO: {shares} replicas"
    if found.replicas is None:
        line += "; none of these is enough."
    else:
        more = found.replicas - winner.replicas
        line += f"; {'as many are enough' if not more else f'take {more} more (N+{more})'}."
    up = ", ".join(f"{share:.2%} of the time with {count}" for count, share in found.all_up.items())
    return [line, *([f"At least {winner.replicas} are up {up}, in closed form."] if up else [])]


def _comparison(result: PlanResult, winner: Finalist) -> list[str]:
    runner_up = result.runner_up
    if runner_up is None:
        return ["No other finalist serves the rate, so there is nothing to compare it with.", *_near_misses(result)]
    mine, its = result.figure(winner), result.figure(runner_up)
    margin = result.margin(runner_up)
    unit = OBJECTIVES[result.spec.objective]
    if margin < 0.005:
        reserve = winner.rate / runner_up.rate - 1
        lines = [
            f"A tie with {runner_up.label} ({its:.4g} {unit} beside {mine:.4g}); the choice's maximum rate is "
            f"{reserve:+.0%} against it."
        ]
    else:
        lines = [f"Runner-up: {runner_up.label}, {its:.4g} {unit} beside {mine:.4g}; the margin is {margin:.0%}."]
    share = result.better_share(winner, runner_up)
    lines.append(
        f"Were each bought by what it turns out to need, the choice would be better than the runner-up in "
        f"{in_100(share)}, the same for both where they share a device"
        + (f": their order is in doubt (below {SURE:.0%})." if result.is_doubtful(runner_up) else ".")
    )
    if _is_apart(winner):
        usual = next((each for each in (*result.ranked, *result.missed) if not _is_apart(each)), None)
        if usual is not None:
            lines.append(
                f"Best without prefill engines of their own: {usual.label}, {result.figure(usual):.4g} {unit}, "
                f"{usual.attained:.0%} of requests within the SLO."
            )
    return lines + _near_misses(result)


def _near_misses(result: PlanResult) -> list[str]:
    """What would have been preferred, had the simulator not found it to miss the SLO."""
    sign = 1.0 if result.is_better_low else -1.0
    best = sign * result.figure(result.winner) if result.winner is not None else inf
    better = [each for each in result.missed if sign * result.figure(each) < best]
    if not better:
        return []
    each = max(better, key=lambda one: one.attained)
    return [
        f"Screened as better, but not so when simulated: {each.label}, with {each.attained:.1%} of requests within the "
        f"SLO at the target rate."
    ]


def bound_sentence(shares: Mapping[str, float]) -> list[str]:
    """What the devices' time goes to, where that is known."""
    return [f"Device time goes to: {shares_text(shares)}."] if shares else []


def _is_apart(finalist: Finalist) -> bool:
    return finalist.deployment.screened.candidate.ratio is not None


def price_text(finalist: Finalist) -> str:
    """USD per hour, with a star for an unconfirmed price (neither listed nor quoted)."""
    return format_optional(finalist.usd_per_hour, ".2f") + ("*" if finalist.has_unconfirmed_price else "")


def priced_title(title: str, finalists: Iterable[Finalist]) -> str:
    """A table's title, with the legend of the star where `price_text` uses one."""
    return (
        f"{title}; * an unconfirmed price" if any(finalist.has_unconfirmed_price for finalist in finalists) else title
    )


def unpriced(result: PlanResult) -> list[str]:
    """A sentence on the devices left out for want of a price; empty if there are none."""
    names = [row.device for row in result.devices if NO_PRICE in row.reason]
    if not result.devices and NO_PRICE in result.ruled_out:
        names = [result.scenario.hardware.name]
    if not names:
        return []
    example = ",".join(f"{name}=USD" for name in names)
    return [f"Left out, as no price of it is known: {', '.join(names)}. Give it by --price {example}."]


def _cost(finalist: Finalist) -> str:
    parts = ["1 GPU" if finalist.num_devices == 1 else f"{finalist.num_devices} GPUs"]
    if finalist.usd_per_hour is not None:
        per_month = finalist.usd_per_hour * _HOURS_PER_MONTH
        parts.append(f"{finalist.usd_per_hour:.2f} USD per hour, {per_month:,.0f} USD per month")
    return ", ".join(parts)


def _tokens(finalist: Finalist) -> str:
    """What tokens cost and take; a bill for both kinds is shared out by the time that each takes."""
    prompts = finalist.mean("usd_per_million_input_tokens_split")
    answers = finalist.mean("usd_per_million_output_tokens_split")
    energy = finalist.mean("joules_per_output_token")
    parts = []
    if prompts is not None and answers is not None:
        parts.append(f"{prompts:.3g} USD per million input tokens and {answers:.3g} USD per million output tokens")
    if energy is not None:
        parts.append(f"{energy:.3g} J per output token, prompts included")
    return "; ".join(parts)


_COSTS = (
    *("gpus", "usd_per_hour", "usd_per_million_input_tokens_split", "usd_per_million_output_tokens_split"),
    *("joules_per_output_token", "rate_per_gpu"),
)
_FRONT = ("gpus", "usd_per_hour", "tightness", "screened_tightness", "attained")
_WIDE = 5  # times the lowest latency: then the highest needs a logarithmic axis beside it


def plan_view(result: PlanResult, command: str = "") -> Document:
    """The answer, pictures, tables, commands, what was searched, notes."""
    blocks: list[Block] = [Sentences(plan_sentences(result))]
    if result.ranked or result.missed:
        blocks.append(Picture("finalists", partial(_finalists_drawn, result)))
    if len(result.front) > 1:
        blocks.append(Picture("front", partial(_front_drawn, result)))
    tables = [_device_table(result), _service(result), _cost_table(result), _screened(result), _front(result)]
    blocks += [*(table for table in tables if table.rows), *trust_blocks(result.trust)]
    if result.winner is not None:
        blocks.append(Commands("To start it", serve_commands(result, result.winner)))
    searched = [f"{choice}: {values}" for choice, values in result.searched.items()]
    searched += [f"{result.num_candidates:,} candidates", f"{result.num_serving:,} serve the rate in closed form"]
    searched += [f"{count:,} {reason}" for reason, count in result.ruled_out.items()]
    left_out = [f"Not carried into the plan: {setting}." for setting in result.left_out]
    blocks += [Sentences(searched, "What was searched"), Notes([*unpriced(result), *left_out, *result.notes])]
    return Document(f"Plan: {result.scenario.name}", blocks, plan_question(result), "plan", command)


def plan_json(result: PlanResult) -> dict[str, Any]:
    """All that the sentences and the tables say, and what each finalist's simulations gave."""
    return {**result.to_json(), "answer": plan_sentences(result)}


def plan_question(result: PlanResult) -> str:
    """What the plan answers, as a sentence."""
    wanted = result.scenario.slo.in_words(result.spec.attainment, "them")
    return (
        f"What serves {result.scenario.model.name} at {result.rate:g} requests/s, {wanted}, best by "
        f"{OBJECTIVES[result.spec.objective]}, on at most {result.spec.max_gpus} GPUs?"
    )


def _device_table(result: PlanResult) -> Table:
    def row(each: DeviceAnswer) -> tuple[str, ...]:
        if not each.label:
            return (each.device, "-", "-", "-", "-", f"none: {each.reason}")
        price = format_optional(each.usd_per_hour, ".2f")
        origin = "simulated" if each.is_simulated else "closed form"
        return (each.device, each.label, str(each.num_devices), price, f"{each.max_rate:.3g}", origin)

    titles = (metric_of(key).title for key in ("gpus", "usd_per_hour", "max_rate"))
    head = ("device", "its best deployment", *titles, "")
    return Table(head, [row(each) for each in result.devices], "Every device asked for", left=2, texts=(5,))


def _service(result: PlanResult) -> Table:
    quantile, winner = result.quantile, result.winner

    def row(each: Finalist) -> tuple[str, ...]:
        better = "-" if winner is None or each is winner else f"{result.better_share(winner, each):.0%}"
        return (
            each.label,
            f"{each.rate:.3g} {_format_interval(each.rate_interval, '.3g')}",
            *(
                f"{format_optional(each.mean(f'{quantile}_{name}_ms'), form)} "
                f"{_format_interval(each.latency_interval(quantile, name), form)}".strip()
                for name, form in (("ttft", ".0f"), ("tpot", ".1f"))
            ),
            format_number(100 * each.attained, 1),
            f"{result.sufficient(each):.0%}",
            better,
            each.deployment.screened.binds,
        )

    seeds = result.spec.seeds
    note = (
        f"The maximum rate is that at which {result.spec.attainment:.0%} of the requests meet the SLO, of the whole "
        f"deployment, simulated under {seeds} seeds; latencies and attainment are at the target rate. In brackets "
        f"80 % intervals: what the calibration leaves unexplained (common draws, carried to the "
        f"simulated value by the screen's formulas) and the scatter of the seeds. suffices: the share of draws in "
        f"which so many replicas serve the target rate; {result.spec.confidence:.0%} are asked for (plan.confidence), "
        f"and of finalists that have replicas for doubt the maximum rate is in proportion. choice better: the share of "
        f"draws, the same for both, in which the first row is better by the objective, if each is bought by what it "
        f"turns out to need. binds: what is missed first beyond the highest rate."
    )
    head = (
        "deployment",
        *(metric_of(key).title for key in ("max_rate", f"{quantile}_ttft_ms", f"{quantile}_tpot_ms", "attained")),
        "suffices",
        "choice better",
        "binds",
    )
    return Table(head, _each(result, row), "Finalists, simulated: how they serve", texts=(len(head) - 1,), note=note)


def _cost_table(result: PlanResult) -> Table:
    certainty = result.certainty
    expected = {} if certainty is None else certainty.expected

    def row(finalist: Finalist) -> tuple[str, ...]:
        low, high = result.interval(finalist)
        return (
            finalist.label,
            str(finalist.num_devices),
            format_optional(expected.get(finalist.deployment.screened.candidate.label), ".2f"),
            price_text(finalist)
            + (f" {_format_interval((low, high), '.2f')}" if result.spec.objective == "cheapest" else ""),
            format_optional(finalist.mean("usd_per_million_input_tokens_split"), ".3g"),
            format_optional(finalist.mean("usd_per_million_output_tokens_split"), ".3g"),
            format_optional(finalist.mean("joules_per_output_token"), ".3g"),
            f"{finalist.rate_per_device:.3g}",
        )

    note = (
        "expected: the cost (devices, where these are the objective) with the price of missing the SLO, which are the "
        "replicas that a draw adds; by it finalists are ranked. Costs and energy are at the target rate. Prefill and "
        "decode cost: the total cost split between prompts and answers by the time that their steps take. Energy per "
        "output token: all of it, prompts included."
    )
    titles = [metric_of(key).title for key in _COSTS]
    head = ("deployment", titles[0], "expected", *titles[1:])
    title = priced_title("Finalists, simulated: what they cost", (*result.ranked, *result.missed))
    return Table(head, _each(result, row), title, note=note)


def _screened(result: PlanResult) -> Table:
    """The maximum rate of every finalist: closed form vs simulated."""

    def row(finalist: Finalist) -> tuple[str, ...]:
        screened = finalist.replicas * finalist.deployment.screened.rate
        return (finalist.label, f"{screened:.3g}", f"{finalist.rate:.3g}", f"{finalist.rate / screened:.2f}")

    ratios = result.ratios
    if ratios is None:
        return Table((), ())
    note = (
        f"The ratio lies between {ratios.rate[0]:.2f} and {ratios.rate[1]:.2f} before replicas are added for "
        f"uncertainty. A candidate that would be better than the best finalist with a ratio of {ratios.rate[1]:.2f} is "
        "simulated, too."
    )
    if result.num_overlooked:
        note += (
            f" {result.num_overlooked:,} more such layouts were not simulated; raise plan.finalists to simulate them."
        )
    head = ("deployment", "closed form, req/s", "simulated, req/s", "ratio")
    return Table(head, _each(result, row), "Maximum rate: closed form and simulation", note=note)


def _front(result: PlanResult) -> Table:
    def row(number: str, point: FrontPoint) -> tuple[str, ...]:
        return (
            number,
            point.label,
            str(point.num_devices),
            format_optional(point.usd_per_hour, ".2f"),
            f"{point.tightness:.2f}",
            f"{point.screened_tightness:.2f}" if isfinite(point.screened_tightness) else "no end",
            format_optional(_ratio(point), ".2f"),
            format_number(100 * point.attained, 1),
        )

    rows = [row(str(number), point) for number, point in enumerate(result.front, 1)]
    rows += [row("misses", point) for point in result.not_serving]
    note = (
        "Deployments that no cheaper one beats in latency, among all that were simulated at the target rate. The limit "
        "is the one that comes nearest; 1 is just met. ratio: simulated over closed form. misses: serves the rate in "
        "closed form, but not simulated."
    )
    *before, attained = (metric_of(key).title for key in _FRONT)
    head = ("", "deployment", *before, "ratio", attained)
    is_worth_it = len(result.front) > 1 or result.not_serving
    return Table(head, rows if is_worth_it else (), "What a higher budget buys, simulated", left=2, note=note)


def _ratio(point: FrontPoint) -> float | None:
    """Simulated latency over closed-form latency; None without a finite closed form."""
    screened = point.screened_tightness
    return point.tightness / screened if isfinite(screened) and screened else None


def _each(result: PlanResult, row: Callable[[Finalist], tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """A row for each finalist, best first; those that miss the SLO at the rate at the end."""
    return tuple(row(each) for each in (*result.ranked, *result.missed))


def _format_interval(interval: Interval | None, form: str) -> str:
    """`[2.6..7.4]`"""
    if interval is None:
        return ""
    low, high = (format(end, form) if isfinite(end) else "no end" for end in interval)
    return f"[{low}..{high}]"


def _finalists_drawn(result: PlanResult) -> str:
    """A bar for each, the choice in another colour, those that miss the SLO at the end."""
    groups: dict[str, list[Bar]] = {}
    for each in (*result.ranked, *result.missed):
        group = "Miss the SLO at the target rate" if each in result.missed else ""
        figure, colour = result.figure(each), COLOURS[0 if each is result.winner else 1]
        interval = result.interval(each)
        bar = Bar(each.label, figure, colour, f"{figure:.3g} {_format_interval(interval, '.3g')}", interval)
        groups.setdefault(group, []).append(bar)
    heading = f"{result.scenario.name}: finalists, best first [80 % intervals]"
    return bars_svg(groups, heading, OBJECTIVES[result.spec.objective])


def _front_drawn(result: PlanResult) -> str:
    """The front, numbered as in the table, and finalists that it beats."""
    names = {point.label for point in result.front}
    numbered = list(enumerate(result.front, 1))
    dots = [Dot(str(number), point.cost, point.tightness, COLOURS[0], True) for number, point in numbered]
    dots += [
        Dot("", each.cost, result.tightness(each), COLOURS[0], False)
        for each in result.ranked
        if each.label not in names
    ]
    x_title = "USD per hour" if result.front[0].usd_per_hour is not None else "GPUs"
    heading = f"{result.scenario.name}: cost and latency at {result.rate:g} requests/s, simulated"
    legend = [f"{number}: {point.label}" for number, point in numbered]
    if len(dots) > len(numbered):
        legend.append("\u25cb: other finalists")
    heights = [dot.y for dot in dots]
    log = ("y",) if max(heights) > _WIDE * min(heights) else ()
    y_title = "latency over its limit (1: just met)"
    return pareto_svg({"": dots}, heading, x_title, y_title, log, legend)


_NUM_OPTIONS = 6


def brief_view(result: PlanResult, question: str) -> Document:
    """The answer for a terminal; `plan_view` has all of it (`--details`)."""
    winner = result.winner
    title = f"Plan: {result.scenario.name}"
    if winner is None:
        reasons = [f"{count:,} candidates: {reason}" for reason, count in result.ruled_out.items()]
        return Document(title, [Sentences([*plan_sentences(result), *reasons, *unpriced(result)])], question, "plan")
    blocks: list[Block] = [Paragraph((Span(_choice(result, winner), "strong"),)), _options(result, winner)]
    blocks += map(Paragraph, (_why_not_cheaper(result, winner), *unpriced(result)))
    blocks.append(Commands("To start it", serve_commands(result, winner)))
    blocks += trust_line(result.trust)
    if notes := result.scenario.model.encoder_notes:
        blocks.append(Notes(notes))
    choices = f" ({', '.join(result.searched)})" if result.searched else ""
    num_simulated = len(result.ranked) + len(result.missed)
    searched = f"{result.num_candidates:,} candidates searched{choices}, {num_simulated} simulated."
    blocks += _assumed(result, winner)
    blocks.append(Paragraph(f"{searched} All sentences, tables and notes: --details, --report FILE or --json."))
    return Document(title, blocks, question, "plan")


def _assumed(result: PlanResult, winner: Finalist) -> list[Block]:
    """The assumed acceptance of the winner's drafts, unless the scenario or the search space gives it."""
    drafts = winner.deployment.screened.candidate.layout.scenario.engine.speculative_config
    is_given = result.scenario.engine.speculative_config is not None or bool(result.spec.space.speculation)
    if drafts is None or is_given:
        return []
    return [Paragraph(f"Assumed: speculation is {result.searched['speculation']}.")]


def _choice(result: PlanResult, winner: Finalist) -> str:
    """`4 x h200-sxm TP4: 16 GPUs, 101.60 USD/h, 84 % sure`"""
    parts = [f"{winner.num_devices} GPU{'s' if winner.num_devices > 1 else ''}"]
    if winner.usd_per_hour is not None:
        mark = " (unconfirmed)" if winner.has_unconfirmed_price else ""
        parts.append(f"{winner.usd_per_hour:.2f} USD/h{mark}")
    sure = f"{result.sufficient(winner):.0%} sure"
    return f"{_label(winner)}: {', '.join([*parts, sure])}"


def _options(result: PlanResult, winner: Finalist) -> Table:
    """The choice, the next ones by rank, and the cheapest one even if it is not sure enough."""
    quantile = result.quantile
    cheapest = min((*result.ranked, *result.missed), key=lambda option: option.cost)
    options = list(result.ranked[:_NUM_OPTIONS])
    if all(option is not cheapest for option in options):
        options = [*options[: _NUM_OPTIONS - 1], cheapest]

    def row(option: Finalist) -> tuple[Line, ...]:
        candidate = option.deployment.screened.candidate
        label = _label(option)
        if candidate.ratio is not None:
            label += f", {candidate.ratio[0]} prefill : {candidate.ratio[1]} decode"
        cells = (
            str(candidate.max_num_seqs),
            str(option.num_devices),
            price_text(option),
            format_optional(option.mean(f"{quantile}_ttft_ms"), ".0f"),
            format_optional(option.mean(f"{quantile}_tpot_ms"), ".1f"),
            f"{option.rate:.3g}",
            f"{result.sufficient(option):.0%}",
            format_optional(option.mean("usd_per_million_output_tokens_split"), ".3g"),
        )
        return (Span(f"> {label}", "strong"), *cells) if option is winner else (f"  {label}", *cells)

    head = (
        *("  deployment", "seqs", "GPUs", "USD/h", f"{quantile} TTFT", f"{quantile} TPOT"),
        *("max req/s", "sure", "USD/M out"),
    )
    return Table(head, [row(option) for option in options], priced_title("Options (latencies in ms)", options))


def _label(option: Finalist) -> str:
    return f"{option.replicas} x {option.deployment.screened.candidate.layout.label}"


def _is_missed(result: PlanResult, option: Finalist) -> bool:
    return any(option is other for other in result.missed)


def _why_not_cheaper(result: PlanResult, winner: Finalist) -> str:
    """Why the surest of the cheaper options was not chosen."""
    cheaper = [option for option in (*result.ranked, *result.missed) if option.cost < 0.995 * winner.cost]
    if not cheaper:
        return "No simulated option is cheaper."
    best = min(cheaper, key=lambda option: (_is_missed(result, option), -result.sufficient(option), option.cost))
    price = "" if best.usd_per_hour is None else f" for {best.usd_per_hour:.2f} USD/h"
    return f"Why not {_label(best)}{price}: {_reason(result, best, winner)}."


def _reason(result: PlanResult, option: Finalist, winner: Finalist) -> str:
    share, spec = result.sufficient(option), result.spec
    if _is_missed(result, option):
        return f"only {option.attained:.0%} of requests meet the SLO at this rate"
    if share < spec.confidence:
        return f"it suffices in {share:.0%} of the draws, plan.confidence asks for {spec.confidence:.0%}"
    if spec.objective != "cheapest":
        figures = f"{result.figure(option):.4g} against {result.figure(winner):.4g}"
        return f"the objective is {OBJECTIVES[spec.objective]}, {figures}"
    return f"with the replicas that draws add it is expected to cost more (it suffices in {share:.0%} of them)"


def job_view(plan: JobPlan, command: str = "") -> Document:
    """The answer, the finalists, the command, what was searched, notes."""
    blocks: list[Block] = [Sentences(_job_sentences(plan)), _table(plan), *trust_blocks(plan.trust)]
    if plan.winner is not None:
        blocks.append(Commands("To start it", batch_command(plan, plan.winner)))
    searched = [f"{plan.num_candidates:,} candidates", f"{plan.num_in_time:,} in time in closed form"]
    searched += [f"{count:,} {reason}" for reason, count in plan.ruled_out.items()]
    blocks += [Sentences(searched, "What was searched"), Notes(plan.notes)]
    return Document(f"Plan: {plan.scenario.name}", blocks, _question(plan), "plan", command)


def job_json(plan: JobPlan) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {**plan.to_json(), "answer": _job_sentences(plan)}


def preliminary_job_sentence(preliminary: PreliminaryJob) -> str:
    """How many candidates are being simulated, and the best one in closed form."""
    if not preliminary.finalists:
        limit = f"{preliminary.spec.max_gpus} GPUs"
        return f"In closed form nothing within {limit} does {preliminary.num_requests:,} requests."
    best = preliminary.finalists[0]
    label = f"{best.replicas} x {best.candidate.layout.label} in {format_duration(best.seconds)}"
    count = f"{len(preliminary.finalists)} of {preliminary.num_candidates:,} candidates"
    return f"Simulating {count}; the best in closed form is {label}."


def _job_sentences(plan: JobPlan) -> list[str]:
    """The answer in sentences."""
    spec, winner = plan.spec, plan.winner
    job = f"{plan.num_requests:,} requests"
    if winner is None:
        when = f" within {format_duration(spec.deadline_s)}" if spec.deadline_s is not None else ""
        nearest = min(plan.late, key=lambda each: each.seconds, default=None)
        answer = f"Nothing within {spec.max_gpus} GPUs does {job}{when}."
        return [answer + (f" First would be {nearest.label}, {_done(nearest)}." if nearest is not None else "")]
    lines = [f"Take {winner.label}: {_devices(winner)}; {job} are {_done(winner)}{_bill(winner)}."]
    if spec.deadline_s is not None:
        lines += _deadline(plan, winner)
    lines.append(f"It comes to {_rates(winner)}.")
    tail = winner.mean("tail_share")
    if tail is not None:
        lines.append(f"Drain time is {tail:.0%} of it: no request waits any more, and batch slots stay empty.")
    return [*lines, *bound_sentence(plan.bound_share), *_job_comparison(plan, winner)]


def _deadline(plan: JobPlan, winner: Job) -> list[str]:
    """How sure it is to be in time, and what that costs."""
    deadline, share, wanted = plan.spec.deadline_s or 0.0, plan.in_time(winner), plan.spec.confidence
    line = (
        f"The deadline of {format_duration(deadline)} leaves {deadline / winner.seconds - 1:.0%} to spare; it is met "
        f"in {in_100(share)} of what the calibrations leave unexplained"
    )
    if share < wanted:
        count = plan.replicas_for_sure(winner, wanted)
        return [
            f"{line}, which is short of the {wanted:.0%} that were asked for (plan.confidence): no finalist does "
            f"better within what is allowed. {count} replicas, in proportion, would."
        ]
    lines = [f"{line}; {wanted:.0%} were asked for (plan.confidence)."]
    plain = plan.plain
    if plain is not None and plain.label != winner.label:
        lines.append(
            f"Were predictions exact, {plain.label} would do{_bill(plain)}; it is in time in "
            f"{in_100(plan.in_time(plain))}."
        )
    return lines


def _job_comparison(plan: JobPlan, winner: Job) -> list[str]:
    others = [job for job in plan.ranked[1:] if job.candidate.kind != winner.candidate.kind] or plan.ranked[1:]
    if not others:
        return ["No other finalist is done in time, so there is nothing to compare it with."]
    other = others[0]
    margin, share = plan.figure(other) / plan.figure(winner) - 1, plan.better_share(winner, other)
    doubt = "" if share >= SURE else f": their order is in doubt (below {SURE:.0%})"
    return [
        f"Runner-up: {other.label}, {_done(other)}{_bill(other)}; the margin is {margin:.0%}.",
        f"In {share:.0%} of the model's errors, the same for both where they share a device, the choice is "
        f"better{doubt}.",
    ]


def _devices(job: Job) -> str:
    count = "1 GPU" if job.num_devices == 1 else f"{job.num_devices} GPUs"
    return count if job.candidate.usd_per_hour is None else f"{count}, {job.price:.2f} USD per hour"


def _done(job: Job) -> str:
    low, high = job.seconds_interval
    return f"done in {format_duration(job.seconds)} (80 % interval {format_duration(low)} to {format_duration(high)})"


def _bill(job: Job) -> str:
    if job.candidate.usd_per_hour is None:
        return f", {job.bill:.3g} GPU hours"
    return f", for {job.bill:.3g} USD"


def _rates(job: Job) -> str:
    parts = []
    output, usd = job.mean("output_throughput_per_gpu"), job.mean("usd_per_million_output_tokens")
    every = job.mean("usd_per_million_tokens")
    if output is not None:
        parts.append(f"{output:,.0f} output tokens per second and GPU")
    if usd and every:
        parts.append(f"{usd:.3g} USD per million output tokens ({1 / every:.3g} million tokens of either kind per USD)")
    energy = job.mean("joules_per_output_token")
    if energy is not None:
        parts.append(f"{energy:.3g} J per output token")
    return ", ".join(parts)


def _table(plan: JobPlan) -> Table:
    """The finalists, best first, late ones at the end."""

    def row(job: Job) -> tuple[str, ...]:
        low, high = job.seconds_interval
        better = "-" if plan.winner is None or job is plan.winner else f"{plan.better_share(plan.winner, job):.0%}"
        return (
            job.label,
            str(job.num_devices),
            f"{format_duration(job.seconds)} [{format_duration(low)}..{format_duration(high)}]",
            "-" if job.candidate.usd_per_hour is None else f"{job.bill:.3g}",
            format_optional(job.mean("output_throughput_per_gpu"), ",.0f"),
            format_optional(job.mean("usd_per_million_output_tokens"), ".3g"),
            format_metric(metric_of("tail_share"), job.mean("tail_share")),
            f"{plan.in_time(job):.0%}",
            better,
            format_duration(job.screened_s),
            f"{job.seconds / job.screened_s:.2f}",
        )

    note = (
        f"Of the whole job, simulated under {plan.spec.seeds} seeds; in brackets 80 % intervals: what the calibration "
        "leaves unexplained (common draws) and the scatter of the seeds. Drain time: in which no request waits any "
        "more. in time: the share of draws in which the deadline is met. choice better: the share of draws, the same "
        "for both, in which the first row is better by the objective. ratio: the simulated time over that of the "
        "closed form. Long jobs are extrapolated from the steady pace of shorter ones."
    )
    shown = ("usd_total", "output_throughput_per_gpu", "usd_per_million_output_tokens", "tail_share")
    head = (
        *("deployment", metric_of("gpus").title, metric_of("duration").name),
        *(metric_of(key).title for key in shown),
        *("in time", "choice better", "closed form", "ratio"),
    )
    return Table(head, [row(job) for job in (*plan.ranked, *plan.late)], "Finalists, simulated", note=note)


def _question(plan: JobPlan) -> str:
    """What was asked, in a sentence."""
    spec = plan.spec
    best = "at the lowest cost" if spec.objective == "cheapest_job" else "first"
    when = f" within {format_duration(spec.deadline_s)}" if spec.deadline_s is not None else ""
    job = f"{plan.num_requests:,} requests to {plan.scenario.model.name}"
    return f"Which deployment completes {job}{when} {best}, on at most {spec.max_gpus} GPUs?"
