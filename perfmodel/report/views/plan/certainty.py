"""How sure a plan's choice is, what it costs to be so sure, and what would settle it; in sentences."""

__all__ = ["HOURS_PER_MONTH", "certainty_sentences", "in_100"]

from perfmodel.planning.deployments.doubt import Certainty, Measurement
from perfmodel.planning.deployments.result import PlanResult

HOURS_PER_MONTH = 730  # a year's, over twelve
_LITTLE = 0.01  # of the choice's expected cost: what a measurement has to be worth to be named


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
        month = f", {found.extra_cost * HOURS_PER_MONTH:,.0f} USD per month" if is_usd else ""
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
