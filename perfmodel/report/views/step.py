"""One step as a document: the table of its operators, its roofline; what lies in device memory; the steps of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from perfmodel.cost import plan_memory
from perfmodel.cost.steps.explain import OperatorEstimate, StepEstimate
from perfmodel.planning.typical_step import StepReport
from perfmodel.report import document as doc
from perfmodel.report.document import Block, Details, Document, Line, Notes, Paragraph, Span, Table, Tone
from perfmodel.report.numbers import format_number, format_si
from perfmodel.report.views import scenario as facts
from perfmodel.report.views.scenario import MORE, few_notes, hardware_source, headline, scenario_facts, trust_blocks
from perfmodel.sim.records.columns import StepColumns
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.trust import trust_of

_MAX_OPERATORS = 20  # in brief
_COLUMNS = ("operator", "count", "GFLOP", "MB", "FLOP/B", "µs each", "ms", "%", "bound")
_KERNELS = (
    *("kernel", "tile", "count", "blocks", "waves", "warps", "registers", "SRAM", "spills", "tensor", "per unit"),
    "limited by",
)


@dataclass(frozen=True, slots=True)
class StepKind:
    """All steps of one kind in a run: how many, how long together, how long and how large on average."""

    name: str  # decode | chunk | mixed
    num_steps: int
    busy_s: float
    share: float
    mean_ms: float
    mean_tokens: float


def step_view(report: StepReport, is_roofline: bool = False) -> Document:
    """One step operator by operator; `is_roofline`: with the ridge points of the device."""
    scenario, estimate = report.scenario, report.estimate
    blocks: list[Block] = [Details([scenario_facts(scenario)])]
    if is_roofline:
        peaks = scenario.hardware.declared.peak_flops_per_s
        ridges = ridge_points(scenario.hardware).items()
        rows = [(rate, format_si(peaks[rate], "FLOP/s"), format_number(ridge, 1)) for rate, ridge in ridges]
        blocks.append(Table(("dtype", "peak", "FLOP/byte"), rows, f"Ridge points of {scenario.hardware.name}"))
    blocks += estimate_blocks(estimate)
    blocks += trust_blocks(trust_of(scenario))
    sources = doc.Sentences([hardware_source(scenario)], "Where the numbers come from")
    blocks.append(Details([*step_blocks(report), sources]))
    if report.notes:
        blocks.append(Notes(report.notes))
    title = f"{scenario.name}: roofline" if is_roofline else headline(scenario)
    return Document(title, blocks, f"{report.label}, per device", f"{estimate.origin} times")


def estimate_view(estimate: StepEstimate) -> Document:
    """An estimate alone, without its scenario."""
    return Document("", list(estimate_blocks(estimate)))


def estimate_blocks(estimate: StepEstimate, most: int | None = None) -> Iterator[Block]:
    """Duration and bound of the step, its operators (at most `most` rows), and the pipeline, if any."""
    head = Span(f"{estimate.duration_s * 1e3:.3f} ms a step", "strong")
    tail = f". MFU {estimate.mfu:.1%}, MBU {estimate.mbu:.1%}, {estimate.num_kernels:,} kernels."
    yield Paragraph((head, f" ({estimate.origin}), bound by ", *bound_shares(estimate.bound_share), tail))
    yield _operators(estimate, most)
    if (pipeline := estimate.pipeline) is not None:
        count, num_stages = pipeline.num_plans, len(pipeline.stage_s)
        plans = "One plan is" if count == 1 else f"{count} plans are"
        stages = ", ".join(f"{seconds * 1e3:.3f}" for seconds in pipeline.stage_s)
        few = f" Fewer sequences than stages leave {num_stages - count} of them idle." if count < num_stages else ""
        yield Paragraph(
            f"{num_stages} pipeline stages take {stages} ms. {plans} under way; a plan that meets no other takes "
            f"{pipeline.latency_s * 1e3:.3f} ms. Pipeline bubbles {pipeline.bubble_share:.1%}.{few}"
        )


def step_blocks(report: StepReport) -> Iterator[Block]:
    """The step on the roofline, its operators' times, and the device's memory."""
    estimate, hardware = report.estimate, report.scenario.hardware
    label = f"{report.label}, predicted ({estimate.origin})"
    hidden = [row.name for row in estimate.rows if not (row.flops > 0 and row.hbm_bytes > 0 and row.duration_s > 0)]
    note = f"{label}. One device's share; marker area follows the time."
    if hidden:
        note += f" Not on the plot, because they do no counted FLOPs or move no bytes: {', '.join(hidden)}."
    yield doc.named_plot("Roofline of one step", "step.roofline_figure", note, hardware, estimate.rows)
    yield doc.named_plot("Operators of that step", "step.operators_figure", f"{label}.", estimate.rows)
    plan = plan_memory(report.scenario.model, hardware, report.scenario.engine)
    note = "One device; the line is what a process sees of it."
    yield doc.named_plot("Device memory", "step.memory_figure", note, plan)


def ridge_points(hardware: HardwareSpec) -> dict[str, float]:
    """Intensity (FLOP/byte) where each dtype's peak meets the main memory's bandwidth."""
    return {rate: peak / hardware.memory_bandwidth for rate, peak in hardware.declared.peak_flops_per_s.items()}


def _operators(estimate: StepEstimate, most: int | None = None) -> Table:
    """One row per operator in the model's order, then the exposed host time, then the step. most: rows; the longest
    operators keep theirs, the others are one together"""
    by_time = sorted(estimate.rows, key=lambda row: -row.duration_s)
    others = by_time[most:] if most is not None else []
    rows = [_operator_cells(row, estimate.duration_s) for row in estimate.rows if row not in others]
    if others:
        seconds = sum(row.duration_s for row in others)
        flops = format_number(sum(row.flops for row in others) / 1e9)
        moved = format_number(sum(row.hbm_bytes + row.message_bytes for row in others) / 1e6)
        times = (f"{seconds * 1e3:.3f}", f"{seconds / estimate.duration_s:.1%}")
        rows.append((f"{len(others)} others", "", flops, moved, "", "", *times, ""))
    bubbles_s = estimate.pipeline.bubble_share * estimate.duration_s if estimate.pipeline is not None else 0.0
    exposed_s = estimate.duration_s - estimate.device_s - bubbles_s
    for name, seconds, bound in (("pipeline bubbles", bubbles_s, ""), ("exposed host time", exposed_s, "overhead")):
        if seconds > 1e-12:
            share = f"{seconds / estimate.duration_s:.1%}"
            rows.append((name, "", "", "", "", "", f"{seconds * 1e3:.3f}", share, bound))
    flops, moved = format_number(estimate.flops / 1e9), format_number(estimate.hbm_bytes / 1e6)
    total = ("step", "", flops, moved, "", "", f"{estimate.duration_s * 1e3:.3f}", "", estimate.bound)
    return Table(_COLUMNS, rows, texts=(len(_COLUMNS) - 1,), total=total)


def _operator_cells(row: OperatorEstimate, step_s: float) -> tuple[Line, ...]:
    return (
        row.name,
        f"{row.count:.4g}",
        format_number(row.flops / 1e9),
        format_number((row.hbm_bytes + row.message_bytes) / 1e6),
        format_number(row.intensity if row.hbm_bytes else None, 1),
        format_number(row.time.duration_s * 1e6, 1),
        f"{row.duration_s * 1e3:.3f}",
        f"{row.duration_s / step_s:.1%}",
        Span(f"{row.bound}, {row.link} ({row.num_nodes} nodes)" if row.num_nodes > 1 else row.bound, _tone(row.bound)),
    )


def bound_shares(shares: Mapping[str, float]) -> tuple[Span | str, ...]:
    """`memory 71%  compute 20%  overhead 9%`, largest first."""
    pieces: list[Span | str] = []
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share:
            pieces += [*(["  "] if pieces else []), Span(f"{name} {share:.0%}", _tone(name))]
    return tuple(pieces)


def _tone(bound: str) -> Tone:
    return bound if bound in get_args(Tone) else ""  # type: ignore[return-value]


def kinds_of_steps(steps: StepColumns) -> list[StepKind]:
    """What a run's time went to: decode-only, prefill-only and mixed steps, the longest together first."""
    duration = steps.end_s - steps.start_s
    total = float(duration.sum()) or 1.0
    has_decodes, has_chunks = steps.num_decodes > 0, steps.num_chunks > 0
    masks = {"decode": has_decodes & ~has_chunks, "mixed": has_decodes & has_chunks, "chunk": ~has_decodes & has_chunks}
    kinds = []
    for name, mask in masks.items():
        count = int(steps.num_steps[mask].sum())
        if count:
            busy = float(duration[mask].sum())
            tokens = float(np.dot(steps.num_steps[mask], steps.num_tokens[mask])) / count
            kinds.append(StepKind(name, count, busy, busy / total, busy / count * 1e3, tokens))
    return sorted(kinds, key=lambda kind: -kind.busy_s)


def kinds_view(result: RunResult, kinds: Sequence[StepKind]) -> Document:
    """What a whole run's time went to: `kinds_of_steps` as rows; and the run's notes."""
    rows = [
        (
            *(kind.name, format_number(kind.num_steps, 0), f"{kind.busy_s:.2f}", f"{kind.share:.1%}"),
            *(f"{kind.mean_ms:.3f}", format_number(kind.mean_tokens, 1)),
        )
        for kind in kinds
    ]
    table = Table(("steps", "count", "busy s", "% of busy", "ms each", "tokens each"), rows)
    bound = Paragraph(("Time bound by: ", *bound_shares(result.summary.get("bound_share") or {})))
    blocks: list[Block] = [table, bound, *([Notes(result.notes)] if result.notes else [])]
    return Document(headline(result.scenario), blocks, f"The whole run, {result.clock}")


def occupancy_view(report: StepReport, kernels: Sequence[Mapping[str, Any]]) -> Document:
    """The step's compiled kernels, as `explain_occupancy` of the executor gives them: what each takes of the hardware,
    and how often its blocks fill it."""
    note = (
        "tensor: tensor-core instructions in the binary; per unit: blocks that run at once on a compute unit, and the "
        "share of its warps that they fill; limited by: what keeps it from more."
    )
    rows = []
    for row in kernels:
        # Of a kernel's constants, BLOCK_M=32 BLOCK_K=64 GATED=True, those of the tile.
        sizes = [size for size in row["tile"].split() if size.startswith(("BLOCK", "SPLIT", "TILE"))]
        tile, tensor = " ".join(size.removeprefix("BLOCK_") for size in sizes), row["tensor_instructions"]
        rows.append(
            (
                *(str(row["kernel"]), tile, f"{row['count']:,}", f"{row['blocks']:,}", f"{row['waves']:.2f}"),
                *(str(row["warps"]), str(row["registers"]), f"{row['shared_bytes'] / 1024:.1f} KiB"),
                *(str(row["spills"]), f"{tensor:,}" if tensor else "none"),
                *(f"{row['blocks_per_unit']} ({row['occupancy']:.0%})", str(row["limited_by"])),
            )
        )
    table = Table(_KERNELS, rows, left=2, texts=(len(_KERNELS) - 1,), note=note)
    blocks: list[Block] = [table, *([Notes(report.assumed)] if report.assumed else [])]
    return Document(report.label, blocks, f"Kernels compiled for {report.scenario.hardware.name}")


def step_brief(report: StepReport) -> Document:
    """A step whose shortest operators are one row together."""
    estimate = report.estimate
    blocks: list[Block] = [
        *estimate_blocks(estimate, _MAX_OPERATORS),
        *facts.trust_line(trust_of(report.scenario)),
        *few_notes(report.notes),
        Paragraph(f"Next: `whatif` says what would make it faster. {MORE}."),
    ]
    return Document(headline(report.scenario), blocks, f"{report.label}, per device", f"{estimate.origin} times")
