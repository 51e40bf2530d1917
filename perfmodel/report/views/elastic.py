"""A plan's choice as the traffic changes: through the scenario's own course of load, fixed replicas and ones that
follow it; with another mix of prompts and answers, its split into prefill and decode replicas."""

from collections.abc import Iterator

from perfmodel.planning.finalist import Finalist
from perfmodel.planning.mixes import MixAnswer
from perfmodel.planning.result import PlanResult
from perfmodel.report.document import Plot, Table, named_plot
from perfmodel.report.numbers import format_optional


def changed_sentences(result: PlanResult, winner: Finalist) -> Iterator[str]:
    """What the choice's split and its replicas come to as the traffic changes."""
    yield from _changed_mix(result)
    yield from _over_the_load(result, winner)


def changed_tables(result: PlanResult) -> Iterator[Table]:
    """A row for each mix of prompts and answers, and for each fleet through the scenario's load."""
    if result.mixes:
        heads = ["mix", "prompts", "answers", "this split, req/s", "best split", "its req/s", "binds"]
        title = "If the mix of prompts and answers changes (mean tokens; prefill : decode replicas), in closed form"
        yield Table(heads, list(map(_mix_row, result.mixes)), title, texts=(len(heads) - 1,))
    yield from _fleets(result)


def _mix_row(mix: MixAnswer) -> tuple[str, ...]:
    lengths = f"{mix.prompt_tokens:,.0f}", f"{mix.output_tokens:,.0f}"
    return mix.name, *lengths, f"{mix.max_rate:.3g}", f"{mix.best[0]}:{mix.best[1]}", f"{mix.best_rate:.3g}", mix.binds


def _changed_mix(result: PlanResult) -> Iterator[str]:
    """The mix that costs the chosen split most of its rate, and what split would serve it better."""
    if result.mixes:
        planned, *others = result.mixes
        worst = min(others, key=lambda mix: mix.max_rate / mix.best_rate if mix.best_rate else 1.0)
        (prefills, decodes), split = worst.best, planned.best
        best = "the best of its devices"
        if planned.best_rate > planned.max_rate:
            best = f"of its devices {split[0]}:{split[1]} would serve most, {planned.best_rate:.3g}"
        better = ""
        if worst.best_rate > worst.max_rate:
            better = f"; with {worst.name} {worst.max_rate:.3g}, where {prefills}:{decodes} would serve "
            better += f"{worst.best_rate:.3g}"
        yield f"In closed form its split serves {planned.max_rate:.3g} requests/s, {best}{better}."


def _over_the_load(result: PlanResult, winner: Finalist) -> Iterator[str]:
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


def _fleets(result: PlanResult) -> Iterator[Table]:
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
