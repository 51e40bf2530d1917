"""A what-if in sentences, tables and pictures: which resource counts, where bounds change, what alternatives pay."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from perfmodel.planning.axes import Axis
from perfmodel.planning.metrics import Metric, metric_of, study_metric
from perfmodel.planning.points import Record
from perfmodel.planning.speculation import DraftChoice, SpeculationAdvice
from perfmodel.planning.sweep import SweepResult
from perfmodel.planning.whatif import NEAR, WhatIfAnswers, WhatIfResult
from perfmodel.report.document import Block, Document, Line, Notes, Paragraph, Plot, Sentences, Span, Table
from perfmodel.report.numbers import MISSING, format_metric, format_short
from perfmodel.report.plots import whatif as plots
from perfmodel.report.plots.whatif import path_label
from perfmodel.report.views.scenario import MORE, few_notes, headline, headline_with_slo, trust_blocks, trust_line
from perfmodel.trust import trust_of

_SMALL = 0.02  # an elasticity below is reported as none
_FAR = 0.1  # of a metric's logarithm over a whole axis: reported where no elasticity is
_MOST = 3  # values that are named in a sentence
_PHYSICAL = ("compute", "memory", "communication")


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
    metrics = [study_metric(name) for name in result.answers.question.base.metrics]
    lines = [*_choices(result.answers, metrics), *_load(result)]
    lines += [line for metric in metrics if counts for line in _counts(result.answers, metric)]
    return [*lines, *_bounds(result), *_payoffs(result, metrics)]


def _choices(answers: WhatIfAnswers, metrics: Sequence[Metric]) -> Iterator[str]:
    """Which value is best, by each metric, on axes that have names for values (devices, policies)."""
    for axis in answers.question.axes:
        records = {} if axis.xs else dict(zip(axis.texts, answers.by_axis[axis.path], strict=True))
        for metric in metrics if records else ():
            known = [(key, value) for key, one in records.items() if (value := one.values.get(metric.key)) is not None]
            known.sort(key=lambda item: item[1] if metric.is_better_low else -item[1])
            named = ", ".join(f"{name} {format_metric(metric, value)}" for name, value in known)
            if named:
                yield f"Which {path_label(axis.path)}? By {metric.title}: {named}."
        for name, record in records.items():
            if record.problem:
                yield f"No answer for {name}: {record.problem}"


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


def _counts(answers: WhatIfAnswers, metric: Metric) -> Iterator[str]:
    """The largest elasticities; where small changes do nothing, what large ones do."""
    base = answers.base.values.get(metric.key)
    effects = [(one, one.elasticity) for one in answers.of_metric(metric.key) if one.elasticity is not None]
    if base is None or not effects:
        return
    name = f"{metric.name} ({f'{format_metric(metric, base)} {metric.unit}'.rstrip()})"
    large = sorted((pair for pair in effects if abs(pair[1]) >= _SMALL), key=lambda pair: -abs(pair[1]))[:_MOST]
    if large:
        changes = (
            f"1 % more {path_label(one.axis.path)} is {abs(size):.2f} % {'more' if size > 0 else 'less'}"
            for one, size in large
        )
        yield f"{name}: {'; '.join(changes)}."
        return
    moving = [one for one, _ in effects if one.swing >= _FAR and one.axis.xs and one.low and one.high]
    far = ""
    if moving:
        most = max(moving, key=lambda one: one.swing)
        low, high = _ends_of(most.axis)
        ends = f"{format_metric(metric, most.low)} to {format_metric(metric, most.high)}"
        far = f"; from {low} to {high}, {path_label(most.axis.path)} takes it from {ends}"
    yield f"{name}: no small change of what was varied moves it (elasticities below {_SMALL:g}){far}."


def _bounds(result: WhatIfResult) -> Iterator[str]:
    """What bounds the step, from where on something else does, and whether batches get that large."""
    largest = result.largest_batch
    yield f"{result.step_label}: {result.step_bound}-bound."
    for change in result.bounds:
        if change.what == "step":
            at = place_label(change.path, change.at, change.unit)
            yield f"The step is {change.after}-bound from {at} on, {change.before}-bound below."
    turns: dict[tuple[float, str], list[str]] = {}
    for change in result.bounds:
        is_of_operator = change.what != "step" and change.before in _PHYSICAL and change.after in _PHYSICAL
        if is_of_operator and (not largest or change.at <= 2 * largest):  # far beyond it is not worth a sentence
            turns.setdefault((change.at, change.after), []).append(change.what)
    for (batch, after), names in sorted(turns.items(), key=lambda turn: turn[0][0]):
        yield f"From batch {format_short(batch)} on {after}-bound: {', '.join(names)}."
    along = [change for change in result.bounds if change.path == "step.batch"]
    if not result.step.batch or not along:
        return
    step_bounds = [result.step_bound, *(change.after for change in along if change.what == "step")]
    if step_bounds[-1] == "memory" and result.step.context:
        yield (
            f"No batch makes the step as a whole compute-bound: each sequence brings {result.step.context:,} tokens of "
            f"KV cache that are read for it alone."
        )
    if largest and max(change.at for change in along) > largest:
        yield f"Batches of such sequences end at {largest:,} here, by {result.largest_by}."


def _payoffs(result: WhatIfResult, metrics: Sequence[Metric]) -> Iterator[str]:
    """Where the alternative begins to pay; axes along which it is never, or always, better."""
    answers = result.answers
    alternative, turned = " ".join(answers.question.against), set()
    for one in result.payoffs:
        turned.add((one.path, one.metric))
        low, high = (x_label(x, one.unit) for x in (one.low, one.high))
        span = f"{low} to {high} over {one.num_seeds} draws of the traffic"
        where = f"{'above' if one.begins else 'below'} {place_label(one.path, one.at, one.unit)}"
        yield f"{alternative} pays {where} by {study_metric(one.metric).label} ({span})."
    for axis in answers.question.axes if answers.others else ():
        for metric in metrics if axis.xs else ():
            sides = (answers.others[axis.path], answers.by_axis[axis.path])
            pairs = zip(*([record.values.get(metric.key) for record in records] for records in sides), strict=True)
            ratios = [other / base for other, base in pairs if other is not None and base]
            if ratios and (axis.path, metric.key) not in turned:
                yield (
                    f"Along {path_label(axis.path)} no crossover by {metric.label}: with {alternative} it is "
                    f"{min(ratios):.2f} to {max(ratios):.2f} times what it is without."
                )


def whatif_view(result: WhatIfResult, command: str = "") -> Document:
    """The answer, pictures, tables, notes."""
    answers = result.answers
    metrics = [study_metric(name) for name in answers.question.base.metrics]
    blocks: list[Block] = [Sentences(whatif_sentences(result))]
    blocks += _plots(result, metrics)
    blocks += [_sensitivities(answers, metric) for metric in metrics]
    blocks += _values_tables(answers, metrics)
    if answers.grid:
        blocks += [_grid(answers, metric) for metric in metrics]
    blocks += [*trust_blocks(trust_of(answers.scenario)), Notes(_notes(result))]
    subtitle = headline_with_slo(answers.scenario)
    return Document(f"What if: {answers.scenario.name}", blocks, subtitle, "what if", command)


def whatif_json(result: WhatIfResult) -> dict[str, Any]:
    """Every point with its values, sensitivities, crossovers and the sentences."""
    return {**result.to_json(), "answer": whatif_sentences(result), "notes": _notes(result)}


def _notes(result: WhatIfResult) -> list[str]:
    answers = result.answers
    origin = f"Times are {answers.base.origin}; a resource's elasticity is taken {NEAR - 1:.0%} up and down."
    problems = dict.fromkeys([*answers.problems, *answers.base.notes])
    return [*result.assumed, *([origin] if answers.base.origin else []), *problems]


def _has_own_table(answers: WhatIfAnswers, axis: Axis) -> bool:
    """Whether its ends alone would not say enough of an axis: of more than three values, of names, of two sides."""
    return len(axis.texts) > 3 or not axis.xs or bool(answers.others)


def _values_tables(answers: WhatIfAnswers, metrics: Sequence[Metric]) -> Iterator[Table]:
    """Each axis whose values count one by one."""
    for axis in answers.question.axes:
        if _has_own_table(answers, axis):
            sides = {"": answers.by_axis[axis.path]}
            if axis.path in answers.others:
                sides[", alternative"] = answers.others[axis.path]
            label, pairs = path_label(axis.path), [(side, metric) for side in sides for metric in metrics]
            columns = [[_cell(record, metric) for record in sides[side]] for side, metric in pairs]
            head = [label, *(f"{metric.title}{side}" for side, metric in pairs)]
            yield Table(head, list(zip(_places(axis), *columns, strict=True)), f"Along {label}")


def _sensitivities(answers: WhatIfAnswers, metric: Metric) -> Table:
    rows = []
    for one in answers.of_metric(metric.key):
        if one.axis.xs:
            low, high = _ends_of(one.axis)
            elasticity = MISSING if one.elasticity is None else f"{one.elasticity:+.2f}"
            elasticity = "0.00" if elasticity in ("+0.00", "-0.00") else elasticity
            ends = (low, format_metric(metric, one.low), high, format_metric(metric, one.high))
            rows.append([path_label(one.axis.path), *ends, elasticity])
    title = f"{metric.title}: {_cell(answers.base, metric)} as it is"
    return Table(("varied", "from", "gives", "to", "gives", "elasticity"), rows, title)


def _grid(answers: WhatIfAnswers, metric: Metric) -> Table:
    down, across = answers.question.axes
    rows = [
        [place, *(_cell(answers.grid[one, other], metric) for other in across.overrides)]
        for place, one in zip(_places(down), down.overrides, strict=True)
    ]
    return Table([f"{path_label(down.path)} \\ {path_label(across.path)}", *_places(across)], rows, metric.title)


def _places(axis: Axis) -> list[str]:
    """The values of an axis, numbers with three digits."""
    return [x_label(x, axis.unit) for x in axis.xs] if axis.xs else list(axis.texts)


def _ends_of(axis: Axis) -> tuple[str, str]:
    return x_label(axis.xs[0], axis.unit), x_label(axis.xs[-1], axis.unit)


def _cell(record: Record, metric: Metric) -> str:
    return format_metric(metric, record.values.get(metric.key))


def _plots(result: WhatIfResult, metrics: Sequence[Metric]) -> Iterator[Plot]:
    """By metric a tornado, a heat map of a grid, lines beside an alternative's."""
    answers, data = result.answers, cache(result.to_json)

    def plot(title: str, name: str, draw: Callable[..., Any], *places: str) -> Plot:
        return Plot(title, lambda: draw(data(), *places), name=name)

    for metric in metrics:
        key = metric.key
        moving = [one for one in answers.of_metric(key) if one.axis.xs and one.base and one.swing > 0]
        if len(moving) > 1:
            yield plot(metric.title, f"tornado-{key}", plots.tornado, key)
        if answers.grid:
            yield plot(metric.title, f"grid-{key}", plots.grid_figure, key)
        for axis in answers.question.axes:
            if len(axis.xs) > 3 or (axis.xs and answers.others):
                title = f"{metric.name} along {path_label(axis.path)}"
                yield plot(title, f"{axis.path}-{key}", plots.along_figure, axis.path, key)


def sweep_view(result: SweepResult) -> Document:
    """Values by path, then the metrics; why points have none."""
    metrics = [metric_of(name) for name in result.metrics]
    rows = [
        (*map(str, values), *(_cell(record, metric) for metric in metrics))
        for values, record in zip(result.values, result.records, strict=True)
    ]
    problems = dict.fromkeys(record.problem for record in result.records if record.problem)
    table = Table((*result.paths, *(metric.title for metric in metrics)), rows, left=0)
    return Document("", [table, Notes(list(problems))])


_MAX_AXES, _MAX_METRICS, _MAX_SENTENCES = 8, 4, 6
_MAX_TABLES, _MAX_VALUES = 2, 9  # of axes that have one of their own
_SHORT = {
    "mean_ttft_ms": "TTFT, ms", "mean_tpot_ms": "TPOT, ms",
    "output_throughput": "output tok/s", "request_goodput": "goodput req/s", "request_throughput": "req/s",
}  # fmt: skip


def whatif_brief(result: WhatIfResult) -> Document:
    """What the ends of each axis do to the first metrics, and the sentences that no table has."""
    answers, sentences = result.answers, whatif_sentences(result, counts=False)
    left = f" {len(sentences) - _MAX_SENTENCES} more sentences." if len(sentences) > _MAX_SENTENCES else ""
    metrics = [study_metric(name) for name in answers.question.base.metrics[:_MAX_METRICS]]
    has_plan = answers.scenario.traffic.beam_width == 1
    further = "`plan` says which deployment serves it" if has_plan else "`explain` says what a step takes"
    tables = list(_values_tables(answers, metrics))[:_MAX_TABLES]
    blocks: list[Block] = [
        *_ends(answers, metrics),
        *(replace(table, rows=table.rows[:_MAX_VALUES]) for table in tables),
        Sentences(sentences[:_MAX_SENTENCES]),
        *trust_line(trust_of(answers.scenario)),
        *few_notes(_notes(result)),
        Paragraph(f"Next: {further}. {MORE}, --report FILE.{left}"),
    ]
    return Document(f"What if: {answers.scenario.name}", blocks, headline_with_slo(answers.scenario), "what if")


def _ends(answers: WhatIfAnswers, metrics: Sequence[Metric]) -> Iterator[Table]:
    """The base values, then a row per numeric axis: `126 .. 666` from its low to its high end."""
    columns = []
    for metric in metrics:
        effects = [one for one in answers.of_metric(metric.key) if one.axis.xs]
        strongest = max(effects, key=lambda one: abs(one.elasticity or 0.0), default=None)
        cells: dict[str, Line] = {}
        for one in effects:
            ends = " .. ".join(MISSING if end is None else format_metric(metric, end) for end in (one.low, one.high))
            cells[one.axis.path] = Span(f"* {ends}", "strong") if one is strongest else ends
        columns.append(cells)
    rows: list[list[Line]] = [
        [path_label(axis.path), " .. ".join(_ends_of(axis)), *(cells.get(axis.path, "") for cells in columns)]
        for axis in answers.question.axes
        if not _has_own_table(answers, axis)
    ][:_MAX_AXES]
    base: list[Line] = ["as given", "", *(_cell(answers.base, metric) for metric in metrics)]
    if rows:
        titles = [_SHORT.get(metric.key, metric.title) for metric in metrics]
        yield Table(("varied", "from .. to", *titles), [base, *rows], "Each varied alone (* counts most)", left=2)


def speculation_sentences(advice: SpeculationAdvice) -> list[str]:
    """The best choice at the present load, and until where each method pays."""
    place, plain = advice.present, advice.plain
    now, best = advice.concurrencies[place], advice.best(place, *advice.drafts)
    load, without = f"With {now:,} in flight in an engine", f"{plain.tpot_ms[place]:.2f} ms without speculation"
    if best is None or advice.gain(best, place) <= 1:
        result = [f"{load} no speculation is fastest: TPOT {without}."]
    else:
        rates = (choice.output_throughput[place] for choice in (best, plain))
        result = [
            f"{load} {_draft_name(best)} is best: TPOT {best.tpot_ms[place]:.2f} instead of {without}, "
            f"{advice.gain(best, place):.2f} times as fast; {' instead of '.join(f'{rate:,.0f}' for rate in rates)} "
            f"output tokens/s."
        ]
    for method, drafts in advice.drafts.items():
        chosen = advice.best(place, method) or drafts[0]
        own, of_method = advice.pays(chosen), advice.pays(*drafts)
        others = "" if of_method == own else f"; with the best length for each load {_ranges_in_flight(of_method)}"
        result.append(f"{_draft_name(chosen)} pays at {_ranges_in_flight(own)} in flight{others}.")
    return result


def speculation_json(advice: SpeculationAdvice, assumed: Sequence[str] = ()) -> dict[str, Any]:
    """The advice with its sentences. assumed: what flags leave open"""
    return {**advice.to_json(), "answer": speculation_sentences(advice), "notes": [*assumed, *advice.notes]}


def speculation_view(
    advice: SpeculationAdvice, command: str = "", assumed: Sequence[str] = (), is_brief: bool = False
) -> Document:
    """Sentences, the choices at the present load, the best of each method along the ladder.

    advice: to show; command: that asked; assumed: sentences on it; is_brief: on one screen"""
    notes = [*advice.notes, f"Closed form, nothing is simulated. Present load: {advice.load}.", *assumed]
    ladder = ("in flight", "none: TPOT, ms", *(f"{method}: best" for method in advice.drafts))
    choices = ("method", "drafted", "tokens/step", "TPOT, ms", "output tok/s", "gain", "pays at")
    blocks: list[Block] = [
        Sentences(speculation_sentences(advice)),
        Table(choices, list(_draft_choices(advice, is_brief)), "At the present load", texts=(6,)),
        Table(ladder, list(_load_ladder(advice, is_brief)), "Along the concurrency: TPOT in ms (drafted tokens, gain)"),
        *trust_line(trust_of(advice.scenario)),
        *(few_notes(notes) if is_brief else [Notes(notes)]),
    ]
    title = f"Does speculation pay: {advice.scenario.name}"
    return Document(title, blocks, headline(advice.scenario), "what if", command)


def _draft_choices(advice: SpeculationAdvice, is_brief: bool) -> Iterator[list[Line]]:
    """Rows of all lengths of each method; in brief the shortest, the best and the longest."""
    place = advice.present
    for drafts in ((advice.plain,), *advice.drafts.values()):
        best = advice.best(place, drafts[0].method) if drafts[0].drafted else None
        for choice in (c for c in drafts if not is_brief or c in (drafts[0], best, drafts[-1])):
            numbers = [MISSING] * 3
            if len(choice.tpot_ms) > place:
                tpot, rate = choice.tpot_ms[place], choice.output_throughput[place]
                numbers = [f"{tpot:.2f}", f"{rate:,.0f}", f"{advice.gain(choice, place):.2f}"]
            where = _ranges_in_flight(advice.pays(choice)) if choice.drafted else ""
            yield [choice.method, str(choice.drafted or ""), f"{choice.tokens_per_step:.2f}", *numbers, where]


def _load_ladder(advice: SpeculationAdvice, is_brief: bool) -> Iterator[list[Line]]:
    """In brief the present concurrency and every other one."""
    for place, size in enumerate(advice.concurrencies):
        if not is_brief or place == advice.present or place % 2 == 0:
            best = [advice.best(place, method) for method in advice.drafts]
            cells = [
                f"{c.tpot_ms[place]:.2f} ({c.drafted}, {advice.gain(c, place):.2f}x)" if c else MISSING for c in best
            ]
            yield [f"{size:,}", f"{advice.plain.tpot_ms[place]:.2f}", *cells]


def _draft_name(choice: DraftChoice) -> str:
    return f"{choice.method} with {choice.drafted} drafted token{'' if choice.drafted == 1 else 's'}"


def _ranges_in_flight(ranges: Sequence[tuple[float, float]]) -> str:
    return " and ".join(f"{low:,.0f} to {high:,.0f}" for low, high in ranges) or "no number"
