"""A plan on one screen: the choice, at most six options, why not a cheaper one, the command, how far to trust it."""

__all__ = ["brief_view"]

from perfmodel.planning.deployments.export import serve_commands
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.result import PlanResult
from perfmodel.report.document import Block, Commands, Document, Line, Notes, Paragraph, Sentences, Span, Table
from perfmodel.report.numbers import format_optional
from perfmodel.report.views.plan.sentences import OBJECTIVES, plan_sentences, price_text, priced_title, unpriced
from perfmodel.report.views.scenario import trust_line

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
