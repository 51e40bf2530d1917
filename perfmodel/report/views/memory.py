"""A memory plan: what fits on a device. It loads neither the simulator nor what was measured."""

from collections import Counter
from collections.abc import Sequence

from perfmodel.cost import MemoryPlan
from perfmodel.cost.memory.file_types import AskedSlots, TypeFit
from perfmodel.report.document import Block, Document, Notes, Paragraph, Span, Table
from perfmodel.report.views.scenario import trust_line
from perfmodel.trust import Trust

_USUAL_TOKENS = 2048  # context per sequence where none is given


def memory_view(
    plan: MemoryPlan, notes: Sequence[str] = (), types: Sequence[TypeFit] = (), trust: Trust | None = None
) -> Document:
    """Weights, activations, states and KV blocks of one device; the largest batch and context.

    plan:  of one device
    notes: sentences at the end
    types: how the model fits in each file type, for engines that can keep layers on the CPU
    trust: in the step times"""
    rows = [(name, f"{size / 1e9:.2f}", f"{size / plan.visible_bytes:.1%}") for name, size in plan.parts]
    usable = ("usable", f"{plan.usable_bytes / 1e9:.2f}", f"{plan.usable_bytes / plan.visible_bytes:.1%}")
    blocks: list[Block] = [
        Paragraph(Span(_slots(plan, types[0].asked) if types else _served(plan), "strong")),
        Table(("memory", "GB", f"of {plan.visible_bytes / 1e9:.2f} GB visible"), rows, total=usable),
        Paragraph(
            f"KV cache: {plan.max_tokens:,} tokens in {plan.num_kv_blocks:,} blocks of {plan.block_size}, "
            f"{plan.kv_bytes_per_token:,.0f} B a token.{_groups(plan)}"
        ),
        *([_types(types)] if types else []),
        *trust_line(trust, " of step times"),
        *([Notes(notes)] if notes else []),
        Paragraph("Next: `explain` says what a step takes, `simulate` what is served. Everything else: --json."),
    ]
    return Document(f"{plan.model} on {plan.num_devices} x {plan.hardware}", blocks, "Per device")


def _served(plan: MemoryPlan) -> str:
    longest, usual = _longest(plan), min(_USUAL_TOKENS, plan.longest or _USUAL_TOKENS)
    return f"It fits: one sequence of up to {longest:,} tokens, or {plan.max_batch(usual):,} of {usual:,} tokens each."


def _slots(plan: MemoryPlan, asked: AskedSlots) -> str:
    """Whether the requested slots fit; if not, the most slots of that context and the longest context of that many."""
    fitting, longest = plan.max_batch(asked.context), _longest(plan, asked.slots)
    if fitting >= asked.slots:
        return f"It fits: {_counted(asked.slots, longest)}."
    sizes = ((fitting, asked.context), (asked.slots, longest))
    fitting_sizes = [_counted(slots, tokens) for slots, tokens in sizes if slots and tokens]
    verdict = f"{_counted(asked.slots, asked.context)} {'does' if asked.slots == 1 else 'do'} not fit."
    return f"{verdict} Largest that fits: {', or '.join(fitting_sizes) or 'none'}."


def _counted(slots: int, tokens: int) -> str:
    return f"{slots} slot of {tokens:,} tokens" if slots == 1 else f"{slots} slots of {tokens:,} tokens each"


def _longest(plan: MemoryPlan, batch: int = 1) -> int:
    """The longest context of `batch` sequences, capped by the model's positions."""
    return min(plan.max_context(batch), plan.longest or plan.max_context(batch))


def _groups(plan: MemoryPlan) -> str:
    """Which tokens each group of layers keeps, where groups have their own blocks."""
    kinds = Counter((group.span, group.is_chunk) for group in plan.kv_groups)
    groups = []
    for (span, is_chunk), count in kinds.items():
        kept = "all tokens" if span is None else f"{'chunks' if is_chunk else 'a window'} of {span:,}"
        groups.append(f"{count} keep{'s' if count == 1 else ''} {kept}")
    return f" A block is of one group of layers: {', '.join(groups)}." if groups else ""


def _types(types: Sequence[TypeFit]) -> Table:
    """Which file types fit, with how many layers and how long a context."""
    rows = [
        (
            fit.file_type.upper(),
            f"{fit.weight_bytes / 1e9:.1f}",
            "yes" if fit.fits else "no",
            f"{fit.layers} of {fit.num_layers}",
            f"{fit.max_context:,}" if fit.max_context else "none",
        )
        for fit in types
    ]
    asked = types[0].asked
    note = (
        "Layers: the largest `n_gpu_layers`; the CPU computes the rest. Longest context: tokens of "
        f"{'the slot' if asked.slots == 1 else 'each slot'} with all layers on the device."
    )
    title = f"Types that fit with {_counted(asked.slots, asked.context)}"
    return Table(("GGUF type", "GB", "fits", "layers", "longest context"), rows, title, note=note)
