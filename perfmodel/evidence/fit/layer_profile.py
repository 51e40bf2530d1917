"""Layer profile of one card: `ops/meta.yaml` and, per tensor-parallel degree, tables of microseconds.

- dense.csv: per layer and token count; per_sequence.csv: LM head, sampler. GEMM layers become rows of a GEMM table;
  small kernels fit their family's roofline.
- attention.csv, whole batches: prefill_chunk (new tokens of the one prompt, 0: none), kv_prefill (its cached tokens),
  n_decode, kv_decode (tokens of each decode), time_us. Pure decodes fit the decode kernel model, pure prompts the
  prefill one; the mixed model takes all batches with a prompt, in one varlen kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.cost.kernel_models.attention.decode import DecodeSizes
from perfmodel.cost.kernel_models.attention.mixed import MixedAttentionFit, MixedSizes
from perfmodel.cost.kernel_models.attention.prefill import PrefillSizes
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Domain, take
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.cost.kernel_models.roofline import FamilyFit, roofline_time
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.attention import DECODES, PROMPTS, decode_sizes, prefill_sizes
from perfmodel.evidence.fit.kernels import Floats, Groups, fit_groups, predict, residuals_of, search_of
from perfmodel.evidence.observation import table_rows
from perfmodel.evidence.sources.kernels import Column, Group, KernelTable
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.models.architecture import Attention
from perfmodel.ops import BatchShape, Work, build_graph
from perfmodel.ops.problem_sizes import GemmSize
from perfmodel.ops.sharding import Sharding
from perfmodel.specs import EngineSpec, HardwareSpec, Sampling, load_hardware, load_model

_ENGINE = "vllm"  # that is profiled
# The profile's layers -> operators of the step graph.
_GEMMS = {name: name for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")}
_SMALL = {"layernorm": "input_norm", "rotary_emb": "rope", "act_fn": "activation", "final_layernorm": "final_norm"}


@dataclass(frozen=True)
class LayerProfile:
    """A profile's GEMM table, and (work, seconds) of each run of a small kernel."""

    hardware: HardwareSpec
    engine: str
    gemms: KernelTable
    small: tuple[tuple[Work, float], ...]


def read_layer_profile(folder: str | Path) -> LayerProfile:
    """Read `<folder>/ops`. Raises SpecError for missing or invalid files."""
    root = Path(folder) / "ops"
    meta = load_yaml(root / "meta.yaml").data
    hardware, model = load_hardware(str(meta["gpu"])), load_model(str(meta["model"]))
    gemms: list[tuple[float, float, float, float]] = []
    small: list[tuple[Work, float]] = []
    for degree, engine in _degrees(root):
        graph = build_graph(model, engine, sampling=Sampling(method="greedy").method)
        nodes = {node.name: node for node in graph.nodes}
        for file, size in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
            for row in table_rows(degree / file):
                name, count, seconds = row["layer"], int(row[size]), float(row["time_us"]) * 1e-6
                operator = _GEMMS.get(name) or _SMALL.get(name)
                if operator is None:
                    continue
                work = nodes[operator].work(BatchShape(count, count))
                if name in _SMALL:
                    small.append((work, seconds))
                else:
                    gemms.append((*work.problem_as(GemmSize)[:3], seconds * 1e3))
    if not gemms:
        raise SpecError(f"{root}: no folder tp<degree> with a dense.csv")
    version = f"{_ENGINE} {meta.get('vllm_version', '')}"
    columns: dict[str, Any] = dict(zip(("m", "n", "k", "latency_ms"), np.array(gemms).T, strict=True))
    texts = {"engine_version": version, "gemm_dtype": "bfloat16", "kernel_source": "layer_profile"}
    columns |= {name: np.array([text] * len(gemms)) for name, text in texts.items()}
    return LayerProfile(hardware, _ENGINE, KernelTable(hardware.name, "gemm", columns), tuple(small))


def _degrees(root: Path) -> list[tuple[Path, EngineSpec]]:
    folders = sorted(root.glob("tp*"))
    return [(path, EngineSpec(tensor_parallel_size=int(path.name.removeprefix("tp")))) for path in folders]


def fit_small_kernels(hardware: HardwareSpec, timed: Sequence[tuple[Work, float]]) -> FamilyFit:
    """Overhead per kernel and achieved bandwidth fraction of elementwise kernels, by log least squares. timed: (work,
    seconds) of each run"""
    from scipy.optimize import least_squares

    device, measured = DeviceFacts.of(hardware), np.array([seconds for _, seconds in timed])

    def fit_of(logs: Floats) -> FamilyFit:
        overhead_s, memory_fraction, cached_speedup = map(float, np.exp(logs))
        return FamilyFit(
            overhead_s=overhead_s, memory_fraction=memory_fraction, knee=1.0, cached_speedup=cached_speedup
        )

    def predicted(fit: FamilyFit) -> Floats:
        return np.array([roofline_time(work, fit, device).duration_s for work, _ in timed])

    start, bounds = np.log([2e-6, 0.8, 2.0]), (np.log([2e-7, 0.05, 1.0]), np.log([5e-5, 1.0, 8.0]))
    result = least_squares(
        lambda logs: np.log(predicted(fit_of(logs)) / measured), start, bounds=bounds, loss="soft_l1", f_scale=0.1
    )
    fit = fit_of(result.x)
    return fit.model_copy(update={"residuals": residuals_of(predicted(fit), measured)})


_SOFTMAX_OPS = range(2, 100, 2)  # what is tried, in the digits that two cards give


def read_profiles(folder: str | Path) -> list[KernelTable]:
    """The tables `<folder>/ops/tp<degree>/attention.csv` (or `.csv.gz`), with the profiled model's heads as tables of
    attention have them."""
    root = Path(folder) / "ops"
    model = load_model(str(load_yaml(root / "meta.yaml").data["model"]))
    mixer = next((layer.mixer for layer in model.iter_layers() if isinstance(layer.mixer, Attention)), None)
    if mixer is None:
        return []
    profiles = []
    for degree, engine in _degrees(root):
        shard = Sharding.of(engine)
        heads = {
            "num_heads": shard.columns(mixer.num_heads),
            "num_key_value_heads": shard.kv_heads(mixer.num_kv_heads),
            "head_dim": mixer.head_dim,
            "kv_cache_dtype": "bfloat16",
        }
        for file in degree.glob("attention.csv*"):
            rows = table_rows(file)
            columns: dict[str, Column] = {name: np.full(len(rows), value) for name, value in heads.items()}
            columns |= {name: np.array([float(row[name]) for row in rows]) for name in (rows[0] if rows else ())}
            profiles.append(KernelTable(model.name, "attention", columns))
    return profiles


def read_cards(folder: str | Path) -> list[Group]:
    """Each card with a layer profile below `folder`, with its batches that have a prompt."""
    cards = []
    for meta in sorted(Path(folder).glob("*/ops/meta.yaml")):
        device = DeviceFacts.of(load_hardware(str(load_yaml(meta).data["gpu"])))
        groups = attention_groups(read_profiles(meta.parents[1]), device)
        cards += [group for group in groups if group.key.startswith("attention_mixed")]
    return cards


def attention_groups(profiles: Sequence[KernelTable], device: DeviceFacts) -> list[Group]:
    """Pure decodes, pure prompts, and batches with a prompt, over all profiles of a card."""
    if not profiles:
        return []
    columns = {name: np.concatenate([profile[name] for profile in profiles]) for name in profiles[0].columns}
    seconds, new, batch = columns["time_us"] * 1e-6, columns["prefill_chunk"], columns["n_decode"]
    one, is_prompt = np.ones(len(new)), new > 0
    alone = {"batch_size": one, "isl": new, "step": columns["kv_prefill"]}
    prompts = prefill_sizes(KernelTable("", "attention", columns | alone))
    decodes = decode_sizes(KernelTable("", "attention", columns | {"batch_size": batch, "step": columns["kv_decode"]}))
    mixed = MixedSizes(prompts.heads, new, prompts.cached, batch, decodes.length, prompts.kv_bytes, longest=one)
    result = []
    for family, sizes, chosen in (
        ("attention_decode", decodes, ~is_prompt),
        ("attention_prefill", prompts, is_prompt & (batch == 0)),
        ("attention_mixed", mixed, is_prompt),
    ):
        rows, key = np.flatnonzero(chosen), f"{family}/bf16/kv_bf16/hd{columns['head_dim'][0]}/flash2"
        result.append(Group(_ENGINE, "", key, device, take(sizes, rows), seconds[rows], rows))
    return result


def fit_attention(group: Group) -> Any:
    """The fit of one of `attention_groups`."""
    match group.sizes:
        case DecodeSizes():
            return DECODES.fit([group])
        case PrefillSizes():
            return PROMPTS.fit([group])
    return _fit_mixed([group], load_overheads().softmax_ops)


def _fit_mixed(groups: Groups, softmax_ops: float) -> MixedAttentionFit:
    domain = Domain(head_dim=int(float(groups[0].sizes.heads.head_dim[0])))
    start = MixedAttentionFit(domain=domain, rate="bf16", softmax_ops=softmax_ops)
    free, starts = search_of("mixed")
    return fit_groups(groups, start, free=free, starts=starts, most_rows=3000)


def fit_softmax(cards: Groups) -> float:
    """Vector operations per score that minimize residuals of batches with a prompt over all cards. One card cannot
    separate the softmax from slower products; cards with different ratios of tensor to vector rate can, as
    `tensor_fraction` is at most 1. cards: mixed batches of each. Raises SpecError for fewer than two."""
    if len(cards) < 2:
        raise SpecError(f"got {len(cards)} layer profiles; the softmax is told from products by two cards or more.")

    def left(softmax_ops: float) -> float:
        fits = [(group, _fit_mixed([group], softmax_ops)) for group in cards]
        return sum(float(np.mean(np.abs(np.log(predict(group, fit) / group.seconds)))) for group, fit in fits)

    return float(min(_SOFTMAX_OPS, key=left))
