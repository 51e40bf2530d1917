"""A memory plan as a document: what lies on a device, and what it can serve."""

__all__ = ["memory_view"]

from perfmodel.cost import MemoryPlan
from perfmodel.report.document import Block, Document, Paragraph, Table


def memory_view(plan: MemoryPlan) -> Document:
    """Weights, activations, states and KV blocks of one device; the largest batch and context."""
    parts = [(f"weights: {name.replace('_', ' ')}", size) for name, size in plan.weights.items() if size]
    parts += [("activations", plan.activation_bytes), ("reserve", plan.reserve_bytes)]
    if plan.graph_bytes:
        parts.append(("CUDA graphs", plan.graph_bytes))
    if plan.state_bytes:
        parts.append((f"states of {plan.max_num_seqs} sequences", plan.state_bytes))
    parts.append(("KV blocks", plan.kv_bytes))
    rows = [(name, f"{size / 1e9:.2f}", f"{size / plan.visible_bytes:.1%}") for name, size in parts]
    usable = ("usable", f"{plan.usable_bytes / 1e9:.2f}", f"{plan.usable_bytes / plan.visible_bytes:.1%}")
    served = (
        f"{plan.num_kv_blocks:,} KV blocks of {plan.block_size} tokens at {plan.kv_bytes_per_token:,.0f} B per token: "
        f"{plan.max_tokens:,} tokens; largest batch at 2,048 tokens {plan.max_batch(2048):,}, "
        f"largest context of one sequence {plan.max_context():,}"
    )
    share = f"of {plan.visible_bytes / 1e9:.2f} GB visible"
    blocks: list[Block] = [Table(("memory", "GB", share), rows, total=usable), Paragraph(served)]
    return Document(f"{plan.model} on {plan.num_devices} x {plan.hardware}", blocks, "Per device")
