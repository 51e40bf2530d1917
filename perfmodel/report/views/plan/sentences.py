"""A plan in sentences: what to deploy, what it costs, who comes next, how sure that is."""

__all__ = [
    "OBJECTIVES",
    "bound_sentence",
    "plan_sentences",
    "preliminary_sentence",
    "price_text",
    "priced_title",
    "unpriced",
]

from collections.abc import Iterable, Mapping
from math import inf

from perfmodel.planning.deployments.choice import Preliminary
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.result import SURE, PlanResult
from perfmodel.planning.screening.space import NO_PRICE
from perfmodel.planning.sweeps.metrics import shares_text
from perfmodel.report.numbers import format_optional
from perfmodel.report.views.plan.certainty import HOURS_PER_MONTH, certainty_sentences, in_100

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
        per_month = finalist.usd_per_hour * HOURS_PER_MONTH
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
