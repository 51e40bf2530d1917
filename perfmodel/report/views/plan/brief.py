"""A plan on one screen: the choice, at most six options, why not a cheaper one, the command, how far to trust it."""

__all__ = ["brief_view"]

from perfmodel.planning.deployments.export import serve_commands
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.result import PlanResult
from perfmodel.report.document import Block, Commands, Document, Line, Paragraph, Sentences, Span, Table
from perfmodel.report.numbers import format_optional
from perfmodel.report.views.plan.sentences import plan_sentences
from perfmodel.report.views.trust import trust_blocks

_NUM_OPTIONS = 6


def brief_view(result: PlanResult, question: str) -> Document:
    """The answer for a terminal; `plan_view` has all of it (`--details`)."""
    winner = result.winner
    title = f"Plan: {result.scenario.name}"
    if winner is None:
        return Document(title, [Sentences(plan_sentences(result))], question, "plan")
    blocks: list[Block] = [Paragraph((Span(_choice(result, winner), "strong"),)), _options(result, winner)]
    blocks.append(Paragraph(_why_not_cheaper(result, winner)))
    blocks.append(Commands("To start it", serve_commands(result, winner)))
    blocks += list(trust_blocks(result.trust))[:1]
    searched = f"{result.num_candidates:,} candidates searched, {len(result.ranked) + len(result.missed)} simulated."
    blocks.append(Paragraph(f"{searched} All sentences, tables and notes: --details, --report FILE or --json."))
    return Document(title, blocks, question, "plan")


def _choice(result: PlanResult, winner: Finalist) -> str:
    """`4 x h200-sxm TP4: 16 GPUs, 101.60 USD/h, 84 % sure`"""
    candidate = winner.deployment.screened.candidate
    parts = [f"{winner.num_devices} GPU{'s' if winner.num_devices > 1 else ''}"]
    if winner.usd_per_hour is not None:
        parts.append(f"{winner.usd_per_hour:.2f} USD/h")
    return f"{winner.replicas} x {candidate.layout.label}: {', '.join([*parts, _sure(result, winner)])}"


def _sure(result: PlanResult, finalist: Finalist) -> str:
    return f"{result.sufficient(finalist):.0%} sure"


def _options(result: PlanResult, winner: Finalist) -> Table:
    """The choice, the next ones by rank, and the cheapest one although it is not sure enough."""
    quantile = result.quantile
    ranked, every = list(result.ranked), [*result.ranked, *result.missed]
    cheapest = min(every, key=_cost)
    options = ranked[:_NUM_OPTIONS]
    if cheapest not in options:
        options = [*options[: _NUM_OPTIONS - 1], cheapest]

    def row(each: Finalist) -> tuple[Line, ...]:
        candidate = each.deployment.screened.candidate
        label = f"{each.replicas} x {candidate.layout.label}"
        if candidate.ratio is not None:
            label += f", {candidate.ratio[0]} prefill : {candidate.ratio[1]} decode"
        cells = (
            str(candidate.max_num_seqs),
            str(each.num_devices),
            format_optional(each.usd_per_hour, ".2f"),
            format_optional(each.mean(f"{quantile}_ttft_ms"), ".0f"),
            format_optional(each.mean(f"{quantile}_tpot_ms"), ".1f"),
            f"{each.rate:.3g}",
            f"{result.sufficient(each):.0%}",
            format_optional(each.mean("usd_per_million_output_tokens_split"), ".3g"),
        )
        return (Span(f"> {label}", "strong"), *cells) if each is winner else (f"  {label}", *cells)

    head = (
        *("  deployment", "seqs", "GPUs", "USD/h", f"{quantile} TTFT", f"{quantile} TPOT"),
        *("max req/s", "sure", "USD/M out"),
    )
    return Table(head, [row(each) for each in options], "Options (latencies in ms)")


def _why_not_cheaper(result: PlanResult, winner: Finalist) -> str:
    cheaper = [each for each in (*result.ranked, *result.missed) if _cost(each) < 0.995 * _cost(winner)]
    if not cheaper:
        return "No simulated option is cheaper."
    best = min(cheaper, key=lambda each: (-result.sufficient(each), _cost(each)))
    label = f"{best.replicas} x {best.deployment.screened.candidate.layout.label}"
    reason = (
        f"only {best.attained:.0%} of requests meet the SLO at this rate"
        if best in result.missed
        else f"it suffices in {result.sufficient(best):.0%} of the draws; plan.confidence asks for "
        f"{result.spec.confidence:.0%}"
    )
    return f"Why not {label} for {format_optional(best.usd_per_hour, '.2f')} USD/h: {reason}."


def _cost(finalist: Finalist) -> float:
    return float(finalist.num_devices) if finalist.usd_per_hour is None else finalist.usd_per_hour
