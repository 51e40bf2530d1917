"""What vLLM counts from a model's configuration and what we do: KV blocks and groups, FLOPs and bytes of a step.

    python benchmarks/witness/engine_counts.py blocks     reads measurements/engine-counts/vllm_0.30.0_blocks.json
    python benchmarks/witness/engine_counts.py steps      reads measurements/engine-counts/vllm_0.30.0_steps.json,
                                                          and writes reports/flops_witness_202611.md with --write

Both read a card's configuration without its `quantization_config`: weights in bf16 on one device. vLLM's side is
recorded by `vllm_blocks.py` and `vllm_flops.py`; nothing here needs vLLM.
"""

__all__ = [
    "REASONS",
    "ROOT",
    "Difference",
    "Layout",
    "differences",
    "layout_of",
    "main",
    "model_of",
    "our_bytes",
    "our_flops",
    "recorded",
    "shape_of",
    "vllm_bytes",
    "vllm_flops",
    "vllm_layout",
]

import json
import sys
from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.cost.memory.footprint import kv_bytes_per_token, state_bytes_per_sequence
from perfmodel.cost.memory.groups import layer_groups, state_blocks
from perfmodel.models.architecture import Attention, GatedDeltaNet, LatentAttention, Mamba, MoEFFN
from perfmodel.models.cards import load_card
from perfmodel.models.hf.config import model_from_config
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.ops.graphs.step import build_graph
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario_file import load_hardware

ROOT = Path(__file__).resolve().parents[2]
_VERSION = "0.30.0"
Group = tuple[str, int | None, int]  # kind (full, window, chunk, state), how far a query sees, layers


class Layout(NamedTuple):
    """How KV blocks are laid out.

    groups:      each with a table of blocks of its own, sorted
    block_bytes: of a block, of all layers that share it
    num_tokens:  of a block of attention
    """

    groups: tuple[Group, ...]
    block_bytes: float
    num_tokens: int


@cache
def recorded(what: str) -> dict[str, Any]:
    """vLLM's answers; what: blocks, steps."""
    file = ROOT / f"measurements/engine-counts/vllm_{_VERSION}_{what}.json"
    answers: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return answers


def model_of(name: str) -> ModelSpec:
    """The model of a card with weights in bf16."""
    card = load_card(ROOT / f"workloads/models/{name}.yaml")
    plain = {key: value for key, value in card.config.items() if key != "quantization_config"}
    return model_from_config({**plain, "torch_dtype": "bfloat16"}, name)


# ---------------------------------------------------------------- KV blocks


def vllm_layout(row: dict[str, Any]) -> Layout:
    """vLLM's, from a recorded row."""
    kinds = {"SlidingWindowSpec": "window", "ChunkedLocalAttentionSpec": "chunk", "MambaSpec": "state"}
    groups = [(kinds.get(group["kinds"][0], "full"), group["span"], group["layers"]) for group in row["groups"]]
    largest = max(group["layers"] * group["page_bytes"][0] for group in row["groups"])
    tokens = next(group["block_size"] for group in row["groups"] if group["kinds"] != ["MambaSpec"])
    return Layout(tuple(sorted(groups, key=str)), largest, tokens)


def layout_of(model: ModelSpec, block_size: int) -> Layout:
    """Ours, with blocks of `block_size` tokens where no state makes them larger."""
    engine = EngineSpec(profile="vllm", version=_VERSION, block_size=block_size)
    hardware, shard = load_hardware("h100-sxm-80gb"), Sharding.of(engine)
    model = served_model(model, engine, hardware)
    layers = list(model.iter_layers())
    with_keys = [layer for layer in layers if isinstance(layer.mixer, Attention | LatentAttention)]
    states = state_blocks(model, hardware, engine)
    if states is not None:
        state = next(layer for layer in layers if isinstance(layer.mixer, Mamba | GatedDeltaNet))
        token = kv_bytes_per_token(model, shard, with_keys[:1])
        tokens = block_size * ceil(state_bytes_per_sequence(model, shard, [state]) / (block_size * token))
        groups = [("state" if group.group.span == 0 else "full", None, len(group.layers)) for group in states.groups]
        return Layout(tuple(sorted(groups, key=str)), max(group[2] for group in groups) * tokens * token, tokens)
    if grouped := layer_groups(model, hardware, engine):
        token = kv_bytes_per_token(model, shard, with_keys[:1])
        groups = [(_kind(item.group.span, item.group.is_chunk), item.group.span, len(item.layers)) for item in grouped]
        return Layout(
            tuple(sorted(groups, key=str)), max(group[2] for group in groups) * block_size * token, block_size
        )
    whole = kv_bytes_per_token(model, shard, with_keys) * block_size
    return Layout((("full", None, len(with_keys)),), whole, block_size)


def _kind(span: int | None, is_chunk: bool) -> str:
    return "full" if span is None else "chunk" if is_chunk else "window"


def _print_blocks() -> None:
    answers = recorded("blocks")
    for name, row in answers["rows"].items():
        theirs = vllm_layout(row)
        is_state = any(kind == "state" for kind, _, _ in theirs.groups)
        ours = layout_of(model_of(name), answers["block_size"] if is_state else theirs.num_tokens)
        blocks = int(answers["available_bytes"] // ours.block_bytes)
        verdict = "equal" if ours == theirs and blocks == row["num_blocks"] else "DIFFERENT"
        print(f"{name:34} {verdict:10} blocks {row['num_blocks']:>7,} {blocks:>7,}")
        if verdict != "equal":
            print(f"    vLLM {theirs}\n    ours {ours}")
    for name, reason in answers["refused"].items():
        print(f"{name:34} refused by vLLM: {reason[:120]}")


# ---------------------------------------------------------------- FLOPs and bytes of a step

_PARTS = {
    "projections of attention": (
        {"qkv_proj", "q_proj", "o_proj", "kv_a_proj", "qkv_a_proj", "q_b_proj", "kv_b_proj", "absorb_query"}
        | {"expand_output"},
        (
            *("attn.qkv_proj", "attn.out_proj", "mla_attn.q_proj", "mla_attn.q_a_proj", "mla_attn.q_b_proj"),
            *("mla_attn.kv_a_proj", "mla_attn.kv_b_proj", "mla_attn.out_proj"),
        ),
    ),
    "attention": (
        {"attention_prefill", "attention_decode"},
        ("attn.attn_qk", "attn.attn_av", "mla_attn.attn_qk", "mla_attn.attn_av"),
    ),
    "feed-forward": (
        {"gate_up_proj", "up_proj", "down_proj", "experts", "latent_in_proj", "latent_out_proj"}
        | {"shared_gate_up_proj", "shared_up_proj", "shared_down_proj"},
        ("ffn.dense_ffn", "ffn.routed_ffn", "ffn.shared_ffn"),
    ),
    "LM head": ({"lm_head"}, ("unembed.unembed",)),
    "recurrent layers": ({"in_proj", "gates_proj", "out_proj", "causal_conv", "chunked_scan", "state_update"}, ()),
    "indexer": ({"index_q_proj", "index_k_proj", "index_weights_proj", "index_prefill", "index_decode"}, ()),
    "router": ({"router", "topk", "shared_expert_gate"}, ()),
}
_REST = "norms, RoPE, activations, sampling"


def shape_of(model: ModelSpec, load: list[Any]) -> BatchShape:
    """The step of a recorded load: requests, new tokens of each, tokens of each with those, whether prompts."""
    count, new, context, is_prompt = load
    if is_prompt:
        return BatchShape(count * new, count, ((new, context - new),) * count)
    return decode_shape(count, context, model.attention_spans)


def our_flops(model: ModelSpec, shape: BatchShape) -> dict[str, float]:
    """FLOPs of our operators by part of the model."""
    part_of = {name: part for part, (names, _) in _PARTS.items() for name in names}
    sums = dict.fromkeys((*_PARTS, _REST), 0.0)
    for node in build_graph(model, EngineSpec()).nodes:
        sums[part_of.get(node.name.split("@")[0], _REST)] += node.work(shape).flops * node.expected_runs(shape)
    return sums


def vllm_flops(counted: dict[str, float]) -> dict[str, float]:
    """FLOPs that vLLM counts, by the same parts."""
    sums = {part: sum(counted.get(name, 0.0) for name in names) for part, (_, names) in _PARTS.items()}
    assert sum(sums.values()) == sum(counted.values()), sorted(counted)
    return {**sums, _REST: 0.0}


def our_bytes(model: ModelSpec, shape: BatchShape) -> tuple[float, float]:
    """Bytes of weights, and all bytes, that our operators read and write."""
    weights = total = 0.0
    for node in build_graph(model, EngineSpec()).nodes:
        work, runs = node.work(shape), node.expected_runs(shape)
        weights += work.weight_bytes * runs
        total += work.hbm_bytes * runs
    return weights, total


def vllm_bytes(counts: dict[str, dict[str, float]]) -> tuple[float, float]:
    """The same of vLLM's."""
    weights = sum(count for name, count in counts["read_bytes"].items() if "weight" in name)
    return weights, sum(counts["read_bytes"].values()) + sum(counts["write_bytes"].values())


class Reason(NamedTuple):
    """Why the two sides count differently: `holds` for (model, configuration, part, whether a prompt)."""

    text: str
    holds: Callable[[ModelSpec, dict[str, Any], str, bool], bool]


def _ffns(model: ModelSpec) -> list[Any]:
    return [layer.ffn for layer, _ in model.layers if layer.ffn is not None]


def _is_hybrid(model: ModelSpec) -> bool:
    """Whether some layers have no attention or no feed-forward block."""
    softmax = (Attention, LatentAttention)
    return any(layer.ffn is None or not isinstance(layer.mixer, softmax) for layer, _ in model.layers)


def _has_unnamed_shared(model: ModelSpec, config: dict[str, Any]) -> bool:
    names = {"n_shared_experts", "num_shared_experts"} & set(config)
    return not names and any(getattr(ffn, "shared_intermediate_size", 0) for ffn in _ffns(model))


def _has_dense_beside_experts(model: ModelSpec) -> bool:
    return len({isinstance(ffn, MoEFFN) for ffn in _ffns(model)}) > 1


def _has_uneven_heads(model: ModelSpec) -> bool:
    heads = {
        (layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mixer.head_dim, layer.mixer.v_head_dim)
        for layer, _ in model.layers
        if isinstance(layer.mixer, Attention)
    }
    return len(heads) > 1 or any(head_dim != v_head_dim for _, _, head_dim, v_head_dim in heads)


_OF_LAYERS = ("projections of attention", "attention", "feed-forward", "recurrent layers", "weights", "bytes")
REASONS = {
    "a": Reason(
        "attention of prompts: vLLM multiplies each new token by the whole context, ours by what it sees (causality)",
        lambda model, config, part, is_prompt: part == "attention" and is_prompt,
    ),
    "b": Reason(
        "latent attention of decodes: ours multiplies latents (2 r_kv + r_rope a head), as the kernels do; vLLM counts "
        "expanded heads (d_nope + d_rope + d_v)",
        lambda model, config, part, is_prompt: (
            part == "attention"
            and not is_prompt
            and any(isinstance(layer.mixer, LatentAttention) for layer, _ in model.layers)
        ),
    ),
    "c": Reason(
        "feed-forward blocks without a gate have two matrices; vLLM counts three everywhere",
        lambda model, config, part, is_prompt: (
            part in ("feed-forward", "weights", "bytes") and any(not ffn.gated for ffn in _ffns(model))
        ),
    ),
    "d": Reason(
        "shared experts: vLLM looks for `n_shared_experts` or `num_shared_experts` and finds none where the "
        "configuration has another name",
        lambda model, config, part, is_prompt: (
            part in ("feed-forward", "weights", "bytes") and _has_unnamed_shared(model, config)
        ),
    ),
    "e": Reason(
        "dense layers among layers with experts: vLLM takes them for layers with experts, or for as wide as an expert",
        lambda model, config, part, is_prompt: (
            part in ("feed-forward", "weights", "bytes") and _has_dense_beside_experts(model)
        ),
    ),
    "f": Reason(
        "hybrids: vLLM counts attention and a feed-forward block in every layer, and no recurrent layer",
        lambda model, config, part, is_prompt: part in _OF_LAYERS and _is_hybrid(model),
    ),
    "g": Reason(
        "the indexer of sparse attention: vLLM counts none, and reads all latents instead of the chosen ones",
        lambda model, config, part, is_prompt: (
            part in ("indexer", "weights", "bytes")
            and any(getattr(layer.mixer, "indexer", None) for layer, _ in model.layers)
        ),
    ),
    "h": Reason(
        "heads that differ between layers, or between keys and values: vLLM takes one size for all",
        lambda model, config, part, is_prompt: (
            part in (*_OF_LAYERS[:2], "weights", "bytes") and _has_uneven_heads(model)
        ),
    ),
    "i": Reason(
        "experts that a step reads: ours expects the distinct experts that independent tokens choose, vLLM the most "
        "that they could",
        lambda model, config, part, is_prompt: (
            part in ("weights", "bytes") and any(isinstance(ffn, MoEFFN) for ffn in _ffns(model))
        ),
    ),
    "j": Reason(
        "bytes of norms, RoPE, residuals, embedding and sampling, which vLLM leaves out; of keys and values that a "
        "prompt reads again",
        lambda model, config, part, is_prompt: part == "bytes",
    ),
}


class Difference(NamedTuple):
    """Of one model and load: FLOPs by part, weights and bytes; share: of vLLM's total; reasons: letters of REASONS."""

    model: str
    load: str
    part: str
    share: float
    reasons: str


def differences(least: float = 0.02) -> list[Difference]:
    """What differs by more than `least` of what vLLM counts, for all cards but those of our own small models."""
    answers, rows = recorded("steps"), []
    for name, loads in answers["rows"].items():
        if name.startswith("tiny-"):
            continue
        model, config = model_of(name), load_card(ROOT / f"workloads/models/{name}.yaml").config
        for load, counts in loads.items():
            for part, share in _shares(model, answers["loads"][load], counts).items():
                if abs(share) > least:
                    is_prompt = answers["loads"][load][3]
                    letters = [key for key, reason in REASONS.items() if reason.holds(model, config, part, is_prompt)]
                    rows.append(Difference(name, load, part, share, "".join(letters)))
    return rows


def _shares(model: ModelSpec, load: list[Any], counts: dict[str, dict[str, float]]) -> dict[str, float]:
    """(ours - vLLM's) of each part, as a share of vLLM's sum."""
    shape = shape_of(model, load)
    ours, theirs = our_flops(model, shape), vllm_flops(counts["flops"])
    total = sum(theirs.values())
    shares = {part: (ours[part] - theirs[part]) / total for part in ours}
    pairs = zip(("weights", "bytes"), our_bytes(model, shape), vllm_bytes(counts), strict=True)
    return shares | {what: result / its - 1 for what, result, its in pairs}


def _print_steps(is_written: bool) -> None:
    lines = ["# FLOPs and bytes of a step: ours vs. vLLM's estimates", "", *_head(), *_table(), "", "Reasons:", ""]
    lines += [f"- **{letter}** {reason.text}." for letter, reason in REASONS.items()]
    text = "\n".join(lines) + "\n"
    if is_written:
        (ROOT / "reports/flops_witness_202611.md").write_text(text, encoding="utf-8")
    print(text)


def _head() -> list[str]:
    answers = recorded("steps")
    count = sum(not name.startswith("tiny-") for name in answers["rows"])
    return [
        f"vLLM {answers['version']} estimates what each step computes and moves from the model's configuration "
        "(its module `vllm.v1.metrics.perf`; the counters `vllm:estimated_flops_per_gpu_total` and its like). Both "
        f"sides take {count} model cards on one device with weights in bf16. vLLM's counts: `{answers['command']}`; "
        "this table: "
        "`python benchmarks/witness/engine_counts.py steps --write`. A cell is ours relative to vLLM's; letters name "
        "the reasons of parts that differ by more than 2 % of vLLM's sum. One card stands for each kind of model.",
        "",
    ]


def _table() -> list[str]:
    answers, result = recorded("steps"), differences()
    loads = ("decode_32x1000", "prompt_2048")
    rows = [
        "| model | FLOPs, decode 32 x 1,000 | FLOPs, prompt 2,048 | bytes, decode | bytes, prompt | weights, decode |"
    ]
    rows.append("|---|---|---|---|---|---|")
    kinds: set[str] = set()
    for name, counts in answers["rows"].items():
        kind = load_card(ROOT / f"workloads/models/{name}.yaml").config["model_type"]
        if kind in kinds or name.startswith("tiny-"):
            continue
        kinds.add(kind)
        model = model_of(name)
        shares = {load: _shares(model, answers["loads"][load], counts[load]) for load in loads}
        cells = [_cell(result, name, load, shares[load], None) for load in loads]
        cells += [_cell(result, name, load, shares[load], "bytes") for load in loads]
        cells.append(_cell(result, name, loads[0], shares[loads[0]], "weights"))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def _cell(found: list[Difference], name: str, load: str, shares: dict[str, float], what: str | None) -> str:
    """A total and the letters of what makes it; what: bytes or weights, None of FLOPs."""
    of_flops = set(shares) - {"weights", "bytes"}
    parts = of_flops if what is None else {what}
    total = sum(shares[part] for part in parts)
    rows = [row for row in found if (row.model, row.load) == (name, load) and row.part in parts]
    return f"{total:+.1%} {''.join(sorted({letter for row in rows for letter in row.reasons}))}".strip()


def main() -> int:
    """Print both sides; `blocks` or `steps`."""
    if "steps" in sys.argv[1:]:
        _print_steps("--write" in sys.argv)
    else:
        _print_blocks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
