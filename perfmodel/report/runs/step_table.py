"""The per-operator table of one step, and the kinds of steps of a whole run, for a terminal."""

__all__ = ["STEP_COLUMNS", "StepKind", "kinds_of_steps", "kinds_table", "pipeline_line", "step_table"]

from dataclasses import dataclass

import numpy as np
from rich.table import Table
from rich.text import Text

from perfmodel.cost.steps.explain import OperatorEstimate, PipelineEstimate, StepEstimate
from perfmodel.report.drawing.fields import format_number
from perfmodel.report.runs.tables import BOUND_STYLES, rows_table
from perfmodel.sim.records.columns import StepColumns

STEP_COLUMNS = ("operator", "count", "GFLOP", "MB", "FLOP/B", "µs each", "ms", "%", "bound")


@dataclass(frozen=True, slots=True)
class StepKind:
    """All steps of one kind in a run: how many, how long together, how long and how large on average."""

    name: str  # decode | chunk | mixed
    num_steps: int
    busy_s: float
    share: float
    mean_ms: float
    mean_tokens: float


def step_table(estimate: StepEstimate) -> Table:
    """One row per operator in the model's order, then the host time that shows, then the step."""
    table = rows_table(STEP_COLUMNS, ())
    table.columns[-1].justify = "left"
    for row in estimate.rows:
        table.add_row(*_operator_cells(row, estimate.duration_s))
    bubbles_s = estimate.pipeline.bubble_share * estimate.duration_s if estimate.pipeline is not None else 0.0
    if bubbles_s > 0:
        share = bubbles_s / estimate.duration_s
        table.add_row("pipeline bubbles", "", "", "", "", "", f"{bubbles_s * 1e3:.3f}", f"{share:.1%}", "")
    shown_s = estimate.duration_s - estimate.device_s - bubbles_s
    if shown_s > 1e-12:
        share = shown_s / estimate.duration_s
        table.add_row("host time that shows", "", "", "", "", "", f"{shown_s * 1e3:.3f}", f"{share:.1%}", "overhead")
    table.add_section()
    table.add_row(
        "step",
        "",
        format_number(estimate.flops / 1e9),
        format_number(estimate.hbm_bytes / 1e6),
        "",
        "",
        f"{estimate.duration_s * 1e3:.3f}",
        "",
        estimate.bound,
        style="bold",
    )
    return table


def pipeline_line(pipeline: PipelineEstimate) -> str:
    """What the stages of a step do, in a sentence."""
    count, num_stages = pipeline.num_plans, len(pipeline.stage_s)
    plans = "one plan is" if count == 1 else f"{count} plans are"
    stages = ", ".join(f"{seconds * 1e3:.3f}" for seconds in pipeline.stage_s)
    few = f"; fewer sequences than stages leave {num_stages - count} of them idle" if count < num_stages else ""
    return (
        f"{num_stages} pipeline stages of {stages} ms: {plans} under way, each through in "
        f"{pipeline.latency_s * 1e3:.3f} ms if it meets no other; bubbles {pipeline.bubble_share:.1%}{few}"
    )


def _operator_cells(row: OperatorEstimate, step_s: float) -> tuple[str | Text, ...]:
    moved = row.hbm_bytes + row.message_bytes
    return (
        row.name,
        f"{row.count:.4g}",
        format_number(row.flops / 1e9),
        format_number(moved / 1e6),
        format_number(row.intensity, 1) if row.hbm_bytes else format_number(None),
        format_number(row.time.duration_s * 1e6, 1),
        f"{row.duration_s * 1e3:.3f}",
        f"{row.duration_s / step_s:.1%}",
        Text(row.bound_and_link, style=BOUND_STYLES.get(row.bound, "")),
    )


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


def kinds_table(kinds: list[StepKind]) -> Table:
    """`kinds_of_steps` as rows."""
    rows = [
        (
            kind.name,
            format_number(kind.num_steps, 0),
            f"{kind.busy_s:.2f}",
            f"{kind.share:.1%}",
            f"{kind.mean_ms:.3f}",
            format_number(kind.mean_tokens, 1),
        )
        for kind in kinds
    ]
    return rows_table(("steps", "count", "busy s", "% of busy", "ms each", "tokens each"), rows)
