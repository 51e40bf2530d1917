"""A plan as a document: what to deploy, who comes next and how sure that is, what it costs, how to start it."""

__all__ = ["plan_json", "plan_question", "plan_view"]

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

from perfmodel.planning.deployments.choice import DeviceAnswer
from perfmodel.planning.deployments.export import serve_commands
from perfmodel.planning.deployments.finalist import Finalist, FrontPoint, Interval
from perfmodel.planning.deployments.result import PlanResult
from perfmodel.planning.metrics import metric_of
from perfmodel.report.document import Block, Commands, Document, Notes, Picture, Sentences, Table
from perfmodel.report.drawing.charts import Bar, Dot, bars_svg, pareto_svg
from perfmodel.report.drawing.figures import COLOURS
from perfmodel.report.numbers import format_number, format_optional
from perfmodel.report.views.plan.sentences import OBJECTIVES, plan_sentences, price_text, priced_title, unpriced
from perfmodel.report.views.scenario import trust_blocks

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
    tables = [_devices(result), _service(result), _costs(result), _screened(result), _front(result)]
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


def _devices(result: PlanResult) -> Table:
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


def _costs(result: PlanResult) -> Table:
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
