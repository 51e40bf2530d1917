"""A what-if in sentences: which resource counts, where the bound changes, where an alternative pays."""

__all__ = ["path_label", "place_label", "whatif_sentences", "x_label"]

from collections.abc import Iterator, Sequence

from perfmodel.planning.metrics import study_metric
from perfmodel.planning.sensitivity.ask import WhatIfResult
from perfmodel.planning.sensitivity.crossovers import Payoff
from perfmodel.planning.sensitivity.whatif import Sensitivity
from perfmodel.report.numbers import format_metric, format_short

_LABELS = {
    "peak_flops": "peak FLOPs",
    "bandwidth": "bandwidth",
    "capacity": "capacity",
    "power_cap_w": "power cap in W",
    "kernels": "kernel overheads",
    "host": "host time",
    "rate": "arrival rate",
    "concurrency": "concurrency",
}
_OF_NETWORKS = {"bandwidth_bytes_per_s": "network bandwidth", "latency_s": "network latency"}
_NAMES = {"hbm": "HBM", "nvlink": "NVLink", "pcie": "PCIe", "infinity_fabric": "Infinity Fabric", "ici": "ICI"}
_SMALL = 0.02  # an elasticity below is reported as none
_FAR = 0.1  # of a metric's logarithm over a whole axis: reported where no elasticity is
_MOST = 3  # values that are named in a sentence
_PHYSICAL = ("compute", "memory", "communication")


def path_label(path: str) -> str:
    """`HBM bandwidth` for hardware.hbm.bandwidth; other paths stay as they are."""
    parts = path.split(".")
    if parts[:2] == ["cluster", "network"] and parts[-1] in _OF_NETWORKS:
        return _OF_NETWORKS[parts[-1]]
    if parts[:2] == ["cluster", "pools"] and "hardware" in parts:
        return f"{path_label('.'.join(parts[3:]))} of pool {parts[2]}"
    if path == "cluster.kv_transfer.bandwidth_bytes_per_s":
        return "KV link bandwidth"
    if path == "hardware":
        return "device"
    label = _LABELS.get(parts[-1])
    if label is None or parts[0] not in ("hardware", "overheads", "traffic"):
        return path
    owner = _NAMES.get(parts[-2], "")
    return f"{owner} {label}" if owner else label if len(parts) == 2 or parts[0] == "traffic" else path


def x_label(x: float, unit: str) -> str:
    """A value on an axis with its unit."""
    return f"{format_short(x)}x" if unit == "x" else f"{format_short(x)} {unit}".strip()


def place_label(path: str, x: float, unit: str) -> str:
    """A place on an axis in a sentence: `6 req/s`, `1.3x the HBM bandwidth`, `batch 148`."""
    if path == "step.batch":
        return f"batch {format_short(x)}"
    if path == "traffic.arrivals.rate" and not unit:
        return f"{format_short(x)} req/s"
    return f"{x_label(x, unit)} the {path_label(path)}" if unit == "x" else f"{path_label(path)} {x_label(x, unit)}"


def whatif_sentences(result: WhatIfResult, counts: bool = True) -> list[str]:
    """Sentences, the largest effect first; without `counts` those that say what no table of the ends of axes has."""
    metrics = result.answers.question.base.metrics
    lines = [*_choices(result), *_load(result)]
    lines += [line for metric in metrics if counts for line in _counts(result, metric)]
    lines += _bounds(result)
    lines += [_payoff(each, " ".join(result.answers.question.against)) for each in result.payoffs]
    return [*lines, *_no_payoff(result)]


def _choices(result: WhatIfResult) -> Iterator[str]:
    """Which value is best, by each metric, on axes that have names for values (devices, policies)."""
    answers = result.answers
    for axis in answers.question.axes:
        if axis.xs:
            continue
        records = dict(zip(axis.texts, answers.by_axis[axis.path], strict=True))
        for name in answers.question.base.metrics:
            metric = study_metric(name)
            known = {text: value for text, each in records.items() if (value := each.values.get(name)) is not None}
            ranked = sorted(known.items(), key=lambda item: item[1] if metric.is_better_low else -item[1])
            if ranked:
                named = [f"{text} {format_metric(metric, value)}" for text, value in ranked]
                yield f"Which {path_label(axis.path)}? By {metric.title}: {', '.join(named)}."
        for text, each in records.items():
            if each.problem:
                yield f"No answer for {text}: {each.problem}"


def _load(result: WhatIfResult) -> Iterator[str]:
    """How much may arrive, where rates are varied."""
    load = result.load
    if load is None:
        return
    if (kept := load.within_slo) is not None:
        if kept.max_rate is None:
            yield f"The SLO is missed even at {format_short(min(load.rates))} req/s."
        elif kept.users is not None:
            more = ", the largest that was tried" if kept.is_all else ""
            pause = f"who pause {format_short(load.think_time_s)} s after an answer" if load.think_time_s else "at once"
            yield f"Within the SLO up to {format_short(kept.max_rate)} req/s{more}: {kept.users:,.0f} users {pause}."
    if load.knee is not None:
        yield f"The knee, where throughput over latency is largest, is at {format_short(load.knee)} req/s."


def _counts(result: WhatIfResult, metric: str) -> Iterator[str]:
    answers = result.answers
    base = answers.base.values.get(metric)
    found = [each for each in answers.of_metric(metric) if each.elasticity is not None]
    large = sorted((e for e in found if abs(e.elasticity or 0) >= _SMALL), key=lambda e: -abs(e.elasticity or 0))
    if base is None or not found:
        return
    asked = study_metric(metric)
    name = f"{asked.name} ({format_metric(asked, base)} {asked.unit})".replace(" )", ")")
    if not large:
        yield f"{name}: no small change of what was varied moves it (elasticities below {_SMALL:g}){_far(found)}."
        return
    effects = "; ".join(_percent(each) for each in large[:_MOST])
    yield f"{name}: {effects}."


def _far(found: Sequence[Sensitivity]) -> str:
    """What large changes do where small ones do nothing."""
    moving = [each for each in found if each.swing >= _FAR and each.axis.xs and each.low and each.high]
    if not moving:
        return ""
    each = max(moving, key=lambda one: one.swing)
    low, high = (x_label(x, each.axis.unit) for x in (each.axis.xs[0], each.axis.xs[-1]))
    assert each.low is not None  # of those that move
    assert each.high is not None
    asked = study_metric(each.metric)
    ends = f"{format_metric(asked, each.low)} to {format_metric(asked, each.high)}"
    return f"; from {low} to {high}, {path_label(each.axis.path)} takes it from {ends}"


def _percent(each: Sensitivity) -> str:
    assert each.elasticity is not None  # those without are left out
    sign = "more" if each.elasticity > 0 else "less"
    return f"1 % more {path_label(each.axis.path)} is {abs(each.elasticity):.2f} % {sign}"


def _bounds(result: WhatIfResult) -> Iterator[str]:
    yield f"{result.step_label}: {result.step_bound}-bound."
    for change in result.bounds:
        if change.what == "step":
            at = place_label(change.path, change.at, change.unit)
            yield f"The step is {change.after}-bound from {at} on, {change.before}-bound below."
    operators = [c for c in result.bounds if c.what != "step" and c.before in _PHYSICAL and c.after in _PHYSICAL]
    if result.largest_batch:  # batches far beyond those that can be are not worth a sentence
        operators = [change for change in operators if change.at <= 2 * result.largest_batch]
    turns: dict[tuple[str, float], list[str]] = {}
    for change in operators:
        turns.setdefault((change.after, change.at), []).append(change.what)
    for (after, batch), names in sorted(turns.items(), key=lambda turn: turn[0][1]):
        yield f"From batch {format_short(batch)} on {after}-bound: {', '.join(names)}."
    yield from _batches(result)


def _batches(result: WhatIfResult) -> Iterator[str]:
    """Whether batches get as large as is looked at, and the step as a whole turns."""
    along = [change for change in result.bounds if change.path == "step.batch"]
    if not result.step.batch or not along:
        return
    turns = [change.after for change in along if change.what == "step"]
    if (turns[-1] if turns else result.step_bound) == "memory" and result.step.context:
        yield (
            f"No batch makes the step as a whole compute-bound: each sequence brings {result.step.context:,} tokens of "
            f"KV cache that are read for it alone."
        )
    if result.largest_batch and max(change.at for change in along) > result.largest_batch:
        yield f"Batches of such sequences end at {result.largest_batch:,} here, by {result.largest_by}."


def _payoff(each: Payoff, alternative: str) -> str:
    where = "above" if each.begins else "below"
    span = (
        f"{x_label(each.low, each.unit)} to {x_label(each.high, each.unit)} over {each.num_seeds} draws of the traffic"
    )
    return (
        f"{alternative} pays {where} {place_label(each.path, each.at, each.unit)} by "
        f"{study_metric(each.metric).label} ({span})."
    )


def _no_payoff(result: WhatIfResult) -> Iterator[str]:
    """Axes along which the alternative is never, or always, better."""
    answers, turned = result.answers, {(each.path, each.metric) for each in result.payoffs}
    if not answers.others:
        return
    for axis in answers.question.axes:
        for metric in answers.question.base.metrics:
            if (axis.path, metric) in turned or not axis.xs:
                continue
            ratio = _ratio(result, axis.path, metric)
            if ratio:
                yield f"Along {path_label(axis.path)} no crossover by {study_metric(metric).label}: {ratio}"


def _ratio(result: WhatIfResult, path: str, metric: str) -> str:
    answers = result.answers
    pairs = [
        (other.values.get(metric), base.values.get(metric))
        for base, other in zip(answers.by_axis[path], answers.others[path], strict=True)
    ]
    ratios = [other / base for other, base in pairs if other is not None and base]
    if not ratios:
        return ""
    alternative = " ".join(answers.question.against)
    return f"with {alternative} it is {min(ratios):.2f} to {max(ratios):.2f} times what it is without."
