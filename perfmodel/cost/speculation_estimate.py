"""A step with speculation, operator by operator: verification, judging, and the passes of the drafter."""

__all__ = ["estimate_speculation"]

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from perfmodel.cost.drafts import DraftTables, Pass, ngram_seconds, passes_of
from perfmodel.cost.estimate import OperatorEstimate, StepEstimate, bound_share, estimate_step, host_fit
from perfmodel.cost.rates import peak_flops_per_s
from perfmodel.cost.roofline import OperatorTimer
from perfmodel.cost.speculation import SpeculationTimer
from perfmodel.cost.step_tables import PS_PER_S, StepTables
from perfmodel.ops.graphs.drafting import rejection
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.work import BatchShape


def estimate_speculation(
    graph: StepGraph, timer: OperatorTimer, drafts: DraftTables, shape: BatchShape, depth: int
) -> StepEstimate:
    """One round of `shape`, the step without drafts: every decode drafts `depth` deep, and is verified.

    Passes of equal sizes are one row an operator, at their mean context.
    """
    config = drafts.config
    drafted = shape.num_decodes * config.nodes_by_depth[depth]
    verified = _verified(shape, drafted, graph.model.attention_spans)
    whole = estimate_step(graph, timer, verified)
    rows = [*_verification(whole, drafts, shape, verified, timer)]
    work = rejection(drafted, graph.model.vocab_size, drafts.method, drafts.has_distribution)
    if drafted:
        rows.append(OperatorEstimate(work.name, 1, work, timer.time(work)))
    device = sum(row.duration_s for row in rows)
    duration = whole.serial_host_s + max(whole.hidden_host_s, device)
    drafting = [shape.num_decodes] * (depth + config.pipelined)
    if config.method == "ngram" and depth:
        duration += ngram_seconds(shape.num_decodes, shape.decode_context)
    if drafts.drafter is not None and drafts.passes is not None:
        passes = passes_of(config, drafts.drafter, drafting, shape.num_decodes, shape.decode_context)
        if not passes and shape.prefills and drafts.drafter.computes_prompts:
            passes = [Pass(0, 1, 0, 0)]
        hidden = host_fit(drafts.passes.graph, drafts.passes.timer).hidden_s(0)
        for label, times, each in _alike(passes):
            of_pass = [*_of_pass(label, times, each, shape, drafts, drafts.passes)]
            seconds = sum(row.duration_s for row in of_pass)
            device += seconds
            duration += max(times * hidden, seconds)
            rows += of_pass
            shape = replace(shape, prefills=())
    if config.pipelined and depth:
        duration = _pipelined(graph, timer, drafts, verified, drafting, drafted)
    return _summed(whole, rows, duration, device, timer)


def _verified(shape: BatchShape, drafted: int, spans: tuple[int, ...]) -> BatchShape:
    """The step that verifies: more tokens, more samples, more KV."""
    return replace(
        shape,
        num_tokens=shape.num_tokens + drafted,
        num_samples=shape.num_samples + drafted,
        decode_context=shape.decode_context + drafted,
        decode_windowed=tuple(
            min(seen + drafted, shape.num_decodes * span)
            for seen, span in zip(shape.decode_windowed, spans, strict=True)
        ),
        group_tokens=shape.group_tokens + drafted if shape.group_tokens else 0,
        decode_tokens=shape.num_decodes + drafted if drafted else 0,
    )


def _verification(
    whole: StepEstimate, drafts: DraftTables, shape: BatchShape, verified: BatchShape, timer: OperatorTimer
) -> Iterator[OperatorEstimate]:
    """Of all layers; or, where drafted tokens have passed the first ones, of those and of the rest."""
    if drafts.first is None or drafts.rest is None or not verified.decode_tokens:
        yield from whole.rows
        return
    only_newest = replace(verified, num_tokens=shape.num_tokens, num_samples=0, decode_tokens=0)
    for row in estimate_step(drafts.first.graph, timer, only_newest).rows:
        yield replace(row, name=f"first layers: {row.name}")
    yield from estimate_step(drafts.rest.graph, timer, verified).rows


def _alike(passes: list[Pass]) -> Iterator[tuple[str, int, Pass]]:
    """Consecutive passes of equal sizes: a label, how many, and one of them with their mean context."""
    for number, (_, group) in enumerate(groupby(passes, key=lambda each: each[:3])):
        same = list(group)
        label = "draft" if number or len(same) == len(passes) else "draft, first pass"
        yield label, len(same), same[0]._replace(context=round(sum(each.context for each in same) / len(same)))


def _of_pass(
    label: str, times: int, each: Pass, shape: BatchShape, drafts: DraftTables, tables: StepTables
) -> Iterator[OperatorEstimate]:
    assert drafts.drafter is not None
    prefills = shape.prefills if drafts.drafter.computes_prompts else ()
    tokens = each.num_seqs * each.queries
    spans = tables.graph.model.attention_spans
    of_pass = BatchShape(
        num_tokens=tokens + sum(new for new, _ in prefills),
        num_samples=each.rows,
        prefills=prefills,
        num_decodes=each.num_seqs,
        decode_context=each.context,
        decode_windowed=tuple(min(each.context, each.num_seqs * span) for span in spans),
        decode_tokens=tokens if each.queries > 1 else 0,
    )
    for row in estimate_step(tables.graph, tables.timer, of_pass).rows:
        yield replace(row, name=f"{label}: {row.name}", count=row.count * times)


def _pipelined(
    graph: StepGraph,
    timer: OperatorTimer,
    drafts: DraftTables,
    verified: BatchShape,
    drafting: list[int],
    drafted: int,
) -> float:
    chunks = sum(new for new, _ in verified.prefills)
    picoseconds = SpeculationTimer(StepTables(graph, timer), drafts).step(
        chunks,
        verified.num_samples - verified.num_decodes - drafted,
        verified.prefills,
        verified.num_decodes,
        verified.decode_context - drafted,
        verified.decode_windowed,
        verified.group_tokens,
        drafting,
        drafted,
    )
    return picoseconds / PS_PER_S


def _summed(
    whole: StepEstimate, rows: list[OperatorEstimate], duration: float, device: float, timer: OperatorTimer
) -> StepEstimate:
    at_peak = sum(row.flops / peak_flops_per_s(timer.hardware, row.work.rate) for row in rows)
    num_bytes = sum(row.hbm_bytes for row in rows)
    return replace(
        whole,
        rows=tuple(rows),
        duration_s=duration,
        device_s=device,
        flops=sum(row.flops for row in rows),
        hbm_bytes=num_bytes,
        mfu=at_peak / duration,
        mbu=num_bytes / timer.hardware.memory_bandwidth / duration,
        bound_share=bound_share(rows, duration, device),
    )
