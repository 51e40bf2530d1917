"""Attention modules of this year's models: their operators, one by one as in a step, and tables that time them whole.

    python benchmarks/attention_modules.py ../shared/truth/ops         # prints a line per table, device and engine
    python benchmarks/attention_modules.py ../shared/truth/ops --rows 400

A row's module (projections, compressors, indexer, attention) is the nodes between a layer's norm and its all-reduce on
a rank with as many heads; each is timed under the device's calibration for the engine, as `explain` does. `kda` times
single kernels: its chunks of prompts and its decodes are one operator each. What `validate operators` predicts these
tables with instead are fits to them.
"""

__all__ = ["main", "modules_of"]

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost import load_calibration
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.evidence.sources.kernels import KernelTable, engine_and_version, read_table
from perfmodel.models import load_model
from perfmodel.models.architecture import GatedDeltaNet
from perfmodel.models.spec import ModelSpec
from perfmodel.ops import BatchShape
from perfmodel.ops.graphs.layers import layer_nodes
from perfmodel.ops.node import LayerContext
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import windowed_contexts
from perfmodel.specs import load_hardware
from perfmodel.specs.engine.formats import sparse_heads_per_tile
from perfmodel.specs.engine.spec import EngineSpec

_TABLES = ("dsv4_csa_context_module", "dsv4_csa_generation_module", "dsv4_hca_context_module")
_TABLES += ("dsv4_hca_generation_module", "msa_context_module", "msa_generation_module", "kda")
_TABLES += ("dsa_context_module", "dsa_generation_module")
_RATIOS = {"csa": 4, "hca": 128}
_OUTSIDE = ("input_norm", "residual_mix", "residual_add", "mixer_all_reduce")
_KERNELS = {"chunk_kda": "chunked_scan", "fused_recurrent_kda_packed_decode": "state_update"}
_KERNELS |= {"fused_recurrent_kda": "state_update", "flashkda_fwd": "chunked_scan"}


class ModuleError(NamedTuple):
    """A group of rows: predicted over measured."""

    table: str
    device: str
    engine: str
    ratios: list[float]

    def __str__(self) -> str:
        errors = np.abs(np.array(self.ratios) - 1)
        bias = float(np.median(self.ratios)) - 1
        return (
            f"{self.table:<28}{self.device:<16}{self.engine:<8}{len(self.ratios):>6} rows"
            f"  median |error| {np.median(errors):6.0%}  p90 {np.quantile(errors, 0.9):6.0%}  bias {bias:+6.0%}"
        )


def _model(op: str, row: dict[str, Any]) -> ModelSpec:
    """The model with one layer of the kind that the table times."""
    name = str(row.get("model") or row.get("model_name"))
    name = {"MiniMax-M3": "minimax-m3", "Kimi-K3": "kimi-k3"}.get(name.rsplit("/", 1)[-1], name)
    if "DeepSeek-V4" in name:
        name = "deepseek-v4-flash" if "Flash" in name else "deepseek-v4-pro"
    model = load_model(name)
    ratio = _RATIOS.get(op.split("_")[-3] if op.startswith("dsv4") else "")
    for layer, _ in model.layers:
        mixer = layer.mixer
        if ratio is not None and getattr(mixer, "ratio", None) == ratio:
            break
        if ratio is None and (isinstance(mixer, GatedDeltaNet) or getattr(mixer, "indexer", None) is not None):
            break
    form = str(row.get("gemm_type") or "bfloat16")
    quantization = model.quantization
    if form == "bfloat16":
        quantization = replace(quantization, weights=None, activations=None)
    elif form == "nvfp4":
        quantization = replace(quantization, weights="nvfp4", activations="nvfp4", group_size=16, group_rows=1)
    else:
        quantization = replace(quantization, weights="fp8", activations="fp8", group_size=128, group_rows=128)
    cache = "fp8" if "fp8" in str(row.get("kv_cache_dtype")) else None
    return replace(model, layers=((layer, 1),), quantization=replace(quantization, kv_cache=cache))


def _shape(op: str, row: dict[str, Any], model: ModelSpec) -> BatchShape:
    batch = int(row["batch_size"])
    if op == "kda":
        new, cached = int(row["seq_len"]), 0
    else:
        new, cached = int(row.get("isl") or 1), int(row["step"])
    if row.get("phase") == "generation" or "generation" in op:
        context = batch * (cached + 1)
        spans = windowed_contexts(batch, context, model.attention_spans)
        return BatchShape(batch, batch, num_decodes=batch, decode_context=context, decode_windowed=spans)
    return BatchShape(batch * new, batch, prefills=((new, cached),) * batch)


def _rows(table: KernelTable, most: int) -> Iterator[tuple[dict[str, Any], float]]:
    sample = table.sampled(most)
    for i in range(len(sample)):
        yield {name: sample[name][i] for name in sample.columns}, float(sample.seconds[i])


def modules_of(path: Path, op: str, most: int) -> list[ModuleError]:
    """The errors of `op` in one system's folder, by engine. most: rows of each kernel, version and format"""
    table = read_table(path / f"{op}.parquet")
    hardware = load_hardware(table.system)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    timers: dict[str, OperatorTimer] = {}
    for row, seconds in _rows(table, most):
        engine, _ = engine_and_version(str(row["engine_version"]))
        wanted = _KERNELS.get(str(row.get("kernel_source")))
        if (op == "kda" and wanted is None) or row.get("phase") == "verify" or "skip" in str(row["op_name"]):
            continue
        model = _model(op, row)
        mixer: Any = model.layers[0][0].mixer
        total = mixer.num_key_heads if op == "kda" else mixer.num_heads
        heads = int(row["num_k_heads"] if op == "kda" else row["num_heads"])
        tp = total // heads if heads and not total % heads else 0
        groups = getattr(mixer, "o_groups", tp or 1)
        if not tp or groups % tp:
            continue  # ranks that the model is not served with
        if engine not in timers:
            timers[engine] = OperatorTimer(hardware, load_calibration(hardware, engine))
        ranks = EngineSpec(tensor_parallel_size=tp, profile=engine)
        tile = sparse_heads_per_tile(ranks, hardware)
        context = LayerContext(model, Sharding.of(ranks), sparse_heads=tile)
        shape = _shape(op, row, model)
        nodes = [node for node in layer_nodes([model.layers[0][0]], context) if node.name.split("@")[0] not in _OUTSIDE]
        mixer_nodes = nodes[: next(i for i, node in enumerate(nodes) if node.name == "post_attention_norm")]
        works = [node.work(shape) for node in mixer_nodes if wanted in (None, node.name)]
        ratios[engine].append(sum(timers[engine].time(work).duration_s for work in works) / seconds)
    return [ModuleError(op, table.system, engine, found) for engine, found in sorted(ratios.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of every table under a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--systems", nargs="*", default=["h200_sxm", "b200_sxm"])
    asked = parser.parse_args(arguments)
    for op in _TABLES:
        for system in asked.systems:
            for line in modules_of(asked.path / system, op, asked.rows):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
