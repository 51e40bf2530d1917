"""A plan's pictures: the finalists by what the objective compares, and what a higher budget buys."""

__all__ = ["plan_pictures"]

from collections.abc import Iterator
from functools import partial

from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.result import PlanResult
from perfmodel.report.document import Picture
from perfmodel.report.drawing.charts import COLOURS, Bar, Dot, bars_svg, pareto_svg
from perfmodel.report.views.plan.sentences import OBJECTIVES
from perfmodel.report.views.plan.tables import format_interval

_WIDE = 5  # times the lowest latency: then the highest needs a logarithmic axis beside it


def plan_pictures(result: PlanResult) -> Iterator[Picture]:
    """Where there is something to draw."""
    if result.ranked or result.missed:
        yield Picture("finalists", partial(_finalists, result))
    if len(result.front) > 1:
        yield Picture("front", partial(_front, result))


def _finalists(result: PlanResult) -> str:
    """A bar for each, the choice in another colour, those that miss the SLO at the end."""
    groups: dict[str, list[Bar]] = {}
    for each in (*result.ranked, *result.missed):
        group = "" if each.attained >= result.spec.attainment else "Miss the SLO at the target rate"
        figure, colour = result.figure(each), COLOURS[0 if each is result.winner else 1]
        interval = result.interval(each)
        bar = Bar(each.label, figure, colour, f"{figure:.3g} {format_interval(interval, '.3g')}", interval)
        groups.setdefault(group, []).append(bar)
    heading = f"{result.scenario.name}: finalists, best first [80 % intervals]"
    return bars_svg(groups, heading, OBJECTIVES[result.spec.objective])


def _front(result: PlanResult) -> str:
    """The front, numbered as in the table, and finalists that it beats."""
    names = {point.label for point in result.front}
    numbered = list(enumerate(result.front, 1))
    dots = [Dot(str(number), point.cost, point.tightness, COLOURS[0], True) for number, point in numbered]
    dots += [
        Dot("", _cost(each), result.tightness(each), COLOURS[0], False)
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


def _cost(finalist: Finalist) -> float:
    return float(finalist.num_devices) if finalist.usd_per_hour is None else finalist.usd_per_hour
