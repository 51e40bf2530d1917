"""A plan's choice through the scenario's own course of load: fixed replicas and ones that follow it."""

from collections.abc import Iterator

from perfmodel.planning.finalist import Finalist
from perfmodel.planning.result import PlanResult
from perfmodel.report.document import Plot, Table
from perfmodel.report.numbers import format_optional
from perfmodel.report.views.step import named_plot


def fleet_sentences(result: PlanResult, winner: Finalist) -> Iterator[str]:
    """What replicas that follow the load save, and what they cost in requests beyond the SLO."""
    known = result.elasticity
    if known is None:
        return
    if known.fixed is None:
        yield f"Replicas that follow the load were not simulated: {known.problem}."
        return
    fixed, best = known.fixed, known.best
    held = (
        f"{winner.replicas} fixed replicas take {fixed.device_hours:.3g} device hours, {fixed.attained:.1%} within it"
    )
    if best is None:
        yield f"Through the scenario's load no fleet that follows it meets the SLO; {held}."
        return
    at = "" if best.target is None else f" at {best.target:g} per replica"
    yield (
        f"Through the scenario's load, replicas that follow it{at} take {best.device_hours:.3g} device hours "
        f"({best.device_hours / fixed.device_hours - 1:+.0%}), {best.attained:.1%} of requests within the SLO; {held}."
    )


def fleet_tables(result: PlanResult) -> Iterator[Table]:
    """A row for each fleet through the scenario's load."""
    known = result.elasticity
    if known is None or known.fixed is None:
        return
    rows = [
        (
            "fixed" if run is known.fixed else "by thresholds" if run.target is None else f"{run.target:g} per replica",
            f"{run.attained:.1%}",
            "yes" if run.is_met else "no",
            str(run.replicas_peak),
            f"{run.device_hours:.3g}",
            format_optional(run.usd, ".2f"),
        )
        for run in (known.fixed, *known.scaled)
    ]
    heads = ["replicas", "within the SLO", "SLO met", "at most", "device hours", "USD"]
    yield Table(heads, rows, "Through the scenario's own load")


def fleet_plots(result: PlanResult) -> Iterator[Plot]:
    """Replicas of the fixed and the chosen fleet over time."""
    known = result.elasticity
    if known is None or known.fixed is None or known.best is None:
        return
    fleets = [("fixed", known.fixed), ("following the load", known.best)]
    pools = [
        {"name": name, "replicas": run.replicas_peak, "replicas_over_time": run.replicas_over_time}
        for name, run in fleets
    ]
    note = "Replicas that serve; dotted with those that are starting and paid for."
    yield named_plot("Replicas over time", "run.replicas_figure", note, pools, known.fixed.duration_s)
