"""A plan in sentences: what to deploy, what it costs, who comes next, how sure that is."""

__all__ = [
    "OBJECTIVES",
    "bound_sentence",
    "certainty_sentences",
    "in_100",
    "plan_sentences",
    "preliminary_sentence",
    "price_text",
    "priced_title",
    "unpriced",
]

from collections.abc import Iterable, Mapping
from math import inf

from perfmodel.planning.deployments.choice import Preliminary
from perfmodel.planning.deployments.doubt import Certainty, Measurement
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.result import SURE, PlanResult
from perfmodel.planning.screening.space import NO_PRICE
from perfmodel.planning.sweeps.metrics import shares_text
from perfmodel.report.numbers import format_optional

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
