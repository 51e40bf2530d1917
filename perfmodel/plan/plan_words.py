"""A plan in words and as a table: what to take, what it costs, who comes next, how sure that is."""

__all__ = ["OBJECTIVE_WORDS", "plan_head", "plan_rows", "plan_text", "plan_words", "ruled_out_words"]

from math import inf

from perfmodel.plan.metrics import shares_in_words
from perfmodel.plan.plan_result import Finalist, PlanResult

OBJECTIVE_WORDS = {
    "cheapest": "USD per hour",
    "fewest_gpus": "GPUs",
    "goodput_per_gpu": "requests/s under the SLO per GPU",
    "lowest_latency": "latency over its limit",
}
_BINDS = {
    "ttft": "the time to the first token",
    "tpot": "the time per output token",
    "e2el": "the end-to-end latency",
    "KV cache": "memory (the KV cache holds no more sequences)",
    "max_num_seqs": "max_num_seqs",
}


def plan_words(result: PlanResult) -> list[str]:
    """The answer in sentences."""
    spec, winner = result.spec, result.winner
    wanted = f"{result.rate:g} requests/s with {spec.attainment:.0%} of them within the SLO"
    if winner is None:
        return [f"Nothing within {spec.max_gpus} GPUs serves {wanted}. {result.nearest}".strip()]
    lines = [f"Take {winner.label}: {_cost(winner)} for {wanted}."]
    low, high = (winner.replicas * end for end in winner.group_rate_interval)
    lines.append(
        f"It serves up to {winner.rate:.3g} requests/s (80 % interval {low:.3g} to {high:.3g}), "
        f"{winner.rate / result.rate - 1:+.0%} of what is wanted; beyond, {_BINDS[winner.deployment.screened.binds]} "
        f"binds first."
    )
    if low < result.rate:
        lines.append(
            f"At the unfavourable end of its interval it serves only {low:.3g} requests/s: measure one replica before "
            f"the rest is bought."
        )
    if result.bound_share:
        lines.append(f"Its devices' time goes to: {shares_in_words(result.bound_share)}.")
    lines += _comparison(result, winner)
    return lines


def _comparison(result: PlanResult, winner: Finalist) -> list[str]:
    runner_up = result.runner_up
    if runner_up is None:
        return ["No other finalist serves the rate, so there is nothing to compare it with."]
    mine, its = result.figure(winner), result.figure(runner_up)
    margin = result.margin(runner_up)
    unit = OBJECTIVE_WORDS[result.spec.objective]
    if margin < 0.005:
        reserve = winner.rate / runner_up.rate - 1
        lines = [
            f"{runner_up.label} is about as good ({its:.4g} {unit} beside {mine:.4g}); the choice serves "
            f"{reserve:+.0%} of its highest rate."
        ]
    else:
        lines = [f"Runner-up: {runner_up.label}, {its:.4g} {unit} beside {mine:.4g}; the margin is {margin:.0%}."]
    a, b = result.interval(winner)
    c, d = result.interval(runner_up)
    if result.is_doubtful(runner_up):
        lines.append(
            f"Their 80 % intervals overlap ({_span(a, b)} and {_span(c, d)} {unit}): the order of the two is in doubt, "
            f"and measuring both would settle it."
        )
    else:
        lines.append(f"Their 80 % intervals ({_span(a, b)} and {_span(c, d)} {unit}) do not overlap.")
    if _is_apart(winner):
        usual = next((each for each in (*result.ranked, *result.missed) if not _is_apart(each)), None)
        if usual is not None:
            lines.append(
                f"Best without prefill engines of their own: {usual.label}, {result.figure(usual):.4g} {unit}, "
                f"{usual.attained:.0%} of requests within the SLO."
            )
    return lines


def _is_apart(finalist: Finalist) -> bool:
    return finalist.deployment.screened.candidate.ratio is not None


def _span(low: float, high: float) -> str:
    return f"{low:.4g} to {'no end' if high == inf else f'{high:.4g}'}"


def _cost(finalist: Finalist) -> str:
    parts = ["1 GPU" if finalist.num_devices == 1 else f"{finalist.num_devices} GPUs"]
    if finalist.usd_per_hour is not None:
        parts.append(f"{finalist.usd_per_hour:.2f} USD per hour")
    tokens = finalist.mean("usd_per_million_output_tokens")
    if tokens is not None:
        parts.append(f"{tokens:.2f} USD per million output tokens")
    return ", ".join(parts)


def ruled_out_words(result: PlanResult) -> list[str]:
    """How many candidates fell out for which reason."""
    return [f"{count:,} {reason}" for reason, count in result.ruled_out.items()]


def plan_head(result: PlanResult) -> list[str]:
    """Titles of `plan_rows`."""
    quantile = result.quantile
    return [
        "deployment",
        "GPUs",
        "USD/h",
        "USD/Mtok out",
        "max req/s",
        "80 % interval",
        "screen",
        "req/s/GPU",
        f"{quantile} TTFT ms",
        f"{quantile} TPOT ms",
        "in SLO",
        "binds",
    ]


def plan_rows(result: PlanResult) -> list[list[str]]:
    """A row for each finalist, best first; those that miss the SLO at the rate at the end."""
    return [_row(result, each) for each in (*result.ranked, *result.missed)]


def _row(result: PlanResult, each: Finalist) -> list[str]:
    low, high = (each.replicas * end for end in each.group_rate_interval)
    return [
        each.label,
        str(each.num_devices),
        _number(each.usd_per_hour, ".2f"),
        _number(each.mean("usd_per_million_output_tokens"), ".2f"),
        f"{each.rate:.3g}",
        f"{low:.3g}..{high:.3g}",
        f"{each.replicas * each.deployment.screened.rate:.3g}",
        f"{each.rate_per_device:.3g}",
        _number(each.mean(f"{result.quantile}_ttft_ms"), ".0f"),
        _number(each.mean(f"{result.quantile}_tpot_ms"), ".1f"),
        f"{each.attained:.1%}",
        each.deployment.screened.binds,
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plan_text(result: PlanResult) -> str:
    """The sentences and the table, aligned."""
    rows = [plan_head(result), *plan_rows(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = plan_words(result)
    if len(rows) > 1:
        lines.append("")
        for row in rows:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            lines.append("  ".join(cells))
    lines.append("")
    lines.append(
        f"{result.num_candidates:,} candidates, {result.num_serving:,} serve the rate; "
        + "; ".join(ruled_out_words(result))
    )
    return "\n".join(lines)
