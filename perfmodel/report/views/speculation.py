"""Whether speculation pays, with which drafter and draft length, and until which concurrency."""

from collections.abc import Iterator, Sequence
from typing import Any

from perfmodel.planning.speculation import DraftChoice, SpeculationAdvice
from perfmodel.report.document import Block, Document, Line, Notes, Sentences, Table
from perfmodel.report.numbers import MISSING
from perfmodel.report.views.scenario import few_notes, headline, trust_line
from perfmodel.trust import trust_of


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
            f"{load} {_name(best)} is best: TPOT {best.tpot_ms[place]:.2f} instead of {without}, "
            f"{advice.gain(best, place):.2f} times as fast; {' instead of '.join(f'{rate:,.0f}' for rate in rates)} "
            f"output tokens/s."
        ]
    for method, drafts in advice.drafts.items():
        chosen = advice.best(place, method) or drafts[0]
        own, of_method = advice.pays(chosen), advice.pays(*drafts)
        others = "" if of_method == own else f"; with the best length for each load {_ranges(of_method)}"
        result.append(f"{_name(chosen)} pays at {_ranges(own)} in flight{others}.")
    return result


def speculation_json(advice: SpeculationAdvice, assumed: Sequence[str] = ()) -> dict[str, Any]:
    """The advice with its sentences. assumed: what flags leave open"""
    return {**advice.to_json(), "answer": speculation_sentences(advice), "notes": [*assumed, *advice.notes]}


def speculation_view(
    advice: SpeculationAdvice, command: str = "", assumed: Sequence[str] = (), is_brief: bool = False
) -> Document:
    """Sentences, the choices at the present load, the best of each method along the ladder. is_brief: on one screen"""
    notes = [*advice.notes, f"Closed form, nothing is simulated. Present load: {advice.load}.", *assumed]
    ladder = ("in flight", "none: TPOT, ms", *(f"{method}: best" for method in advice.drafts))
    choices = ("method", "drafted", "tokens/step", "TPOT, ms", "output tok/s", "gain", "pays at")
    blocks: list[Block] = [
        Sentences(speculation_sentences(advice)),
        Table(choices, list(_choices(advice, is_brief)), "At the present load", texts=(6,)),
        Table(ladder, list(_ladder(advice, is_brief)), "Along the concurrency: TPOT in ms (drafted tokens, gain)"),
        *trust_line(trust_of(advice.scenario)),
        *(few_notes(notes) if is_brief else [Notes(notes)]),
    ]
    title = f"Does speculation pay: {advice.scenario.name}"
    return Document(title, blocks, headline(advice.scenario), "what if", command)


def _choices(advice: SpeculationAdvice, is_brief: bool) -> Iterator[list[Line]]:
    """Of each method all lengths; in brief the shortest, the best and the longest."""
    place = advice.present
    for drafts in ((advice.plain,), *advice.drafts.values()):
        best = advice.best(place, drafts[0].method) if drafts[0].drafted else None
        for choice in (c for c in drafts if not is_brief or c in (drafts[0], best, drafts[-1])):
            numbers = [MISSING] * 3
            if len(choice.tpot_ms) > place:
                tpot, rate = choice.tpot_ms[place], choice.output_throughput[place]
                numbers = [f"{tpot:.2f}", f"{rate:,.0f}", f"{advice.gain(choice, place):.2f}"]
            where = _ranges(advice.pays(choice)) if choice.drafted else ""
            yield [choice.method, str(choice.drafted or ""), f"{choice.tokens_per_step:.2f}", *numbers, where]


def _ladder(advice: SpeculationAdvice, is_brief: bool) -> Iterator[list[Line]]:
    """In brief the present concurrency and every other one."""
    for place, size in enumerate(advice.concurrencies):
        if not is_brief or place == advice.present or place % 2 == 0:
            best = [advice.best(place, method) for method in advice.drafts]
            cells = [
                f"{c.tpot_ms[place]:.2f} ({c.drafted}, {advice.gain(c, place):.2f}x)" if c else MISSING for c in best
            ]
            yield [f"{size:,}", f"{advice.plain.tpot_ms[place]:.2f}", *cells]


def _name(choice: DraftChoice) -> str:
    return f"{choice.method} with {choice.drafted} drafted token{'' if choice.drafted == 1 else 's'}"


def _ranges(ranges: Sequence[tuple[float, float]]) -> str:
    return " and ".join(f"{low:,.0f} to {high:,.0f}" for low, high in ranges) or "no number"
