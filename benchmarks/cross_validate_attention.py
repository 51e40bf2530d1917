"""Cross-validation of attention and collective fits: median / p90 absolute error (%) on rows that no fit has seen.

    python benchmarks/cross_validate_attention.py FOLDER [--kernels]

FOLDER has kernel tables `<system>/<op>.parquet`. Each line is a way of keeping rows aside (a random half, a range of
sizes, a kind of head layout) or a transfer: fitted on one system, predicted on the other with seconds scaled by the
ratio of the declared clocks. `--kernels` shows every kernel instead of every engine.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.fits import transferred
from perfmodel.evidence.fit.attention import DECODES, PROMPTS
from perfmodel.evidence.fit.collectives import COLLECTIVES
from perfmodel.evidence.fit.kernels import KernelModule, predict
from perfmodel.evidence.sources.kernels import Group, read_table
from perfmodel.ops.problem_sizes import HeadShape
from perfmodel.specs import load_hardware

Rows = NDArray[np.bool_]
Rule = Callable[[Group], Rows]


def _half(group: Group) -> Rows:
    return np.random.default_rng(1).random(len(group.seconds)) < 0.5


def _unusual(group: Group) -> Rows:
    """Head counts that are no power of two."""
    return np.asarray(np.log2(_heads(group).num_heads) % 1 > 0)


def _heads(group: Group) -> HeadShape:
    problem: HeadShape = group.sizes.heads if hasattr(group.sizes, "heads") else group.sizes.problem.heads
    return problem


def _half_of_sizes(group: Group) -> Rows:
    sizes = np.unique(group.sizes.payload)
    return np.isin(group.sizes.payload, np.random.default_rng(1).choice(sizes, len(sizes) // 2, replace=False))


_PREFILL: dict[str, Rule] = {
    "half": _half,
    "T >= 8192": lambda g: g.sizes.tokens >= 8192,
    "T <= 64": lambda g: g.sizes.tokens <= 64,
    "B >= 32": lambda g: g.sizes.count >= 32,
    "MHA": lambda g: _heads(g).group == 1,
    "g >= 16": lambda g: _heads(g).group >= 16,
    "unusual heads": _unusual,
    "windows": lambda g: _heads(g).window > 0,
}
_DECODE: dict[str, Rule] = {
    "half": _half,
    "serving sizes, half": lambda g: _half(g) & (g.sizes.problem.num_seqs * g.sizes.length >= 4096),
    "S >= 16384": lambda g: g.sizes.length >= 16384,
    "S <= 64": lambda g: g.sizes.length <= 64,
    "B >= 256": lambda g: g.sizes.problem.num_seqs >= 256,
    "B = 1": lambda g: g.sizes.problem.num_seqs == 1,
    "MHA": lambda g: _heads(g).group == 1,
    "g = 4": lambda g: _heads(g).group == 4,
    "unusual heads": _unusual,
    "windows": lambda g: _heads(g).window > 0,
}
_COLLECTIVES: dict[str, Rule] = {
    "half": _half,
    "half of sizes": _half_of_sizes,
    ">= 32 MB": lambda g: g.sizes.payload >= 3e7,
    "<= 4 KB": lambda g: g.sizes.payload <= 4096,
    "k = 4": lambda g: g.sizes.ranks == 4,
    "k = 8": lambda g: g.sizes.ranks == 8,
}
_TABLES: dict[str, tuple[KernelModule, dict[str, Rule]]] = {
    "context_attention": (PROMPTS, _PREFILL),
    "generation_attention": (DECODES, _DECODE),
    "nccl": (COLLECTIVES, _COLLECTIVES),
    "custom_allreduce": (COLLECTIVES, _COLLECTIVES),
}


def kept_aside(module: KernelModule, group: Group, device: DeviceFacts, rule: Rule) -> NDArray[np.float64]:
    """Absolute errors on the rows that `rule` picks, fitted on the rest; none where either is too small."""
    rows = rule(group)
    if rows.sum() < 5 or (~rows).sum() < 12:
        return np.empty(0)
    rest = group.take(rows)
    fit = module.fit(group.take(~rows), device)
    return np.asarray(np.abs(predict(rest, fit, device) / rest.seconds - 1))


def shown(errors: list[NDArray[np.float64]]) -> str:
    joined = np.concatenate(errors) if errors else np.empty(0)
    if not len(joined):
        return f"{'-':>12}"
    return f"{100 * np.median(joined):5.1f}/{100 * np.quantile(joined, 0.9):5.1f} "


def cross_validate(folder: Path, systems: list[str], op: str, by_kernel: bool) -> None:
    """One table: rules down, engines (or kernels) across."""
    module, rules = _TABLES[op]
    groups: list[tuple[str, Group, DeviceFacts]] = []
    for system in systems:
        file = folder / system / f"{op}.parquet"
        if file.is_file():
            device = DeviceFacts.of(load_hardware(system))
            for group in module.groups(read_table(file), device):
                label = f"{system.split('_')[0]} {group.engine}"
                groups.append((f"{label} {group.key}" if by_kernel else label, group, device))
    labels = sorted({label for label, _, _ in groups})
    width = max(map(len, labels), default=12)
    print(f"\n{op}: median / p90 error, %\n{'kept aside':<22}" + " ".join(f"{label:>{width}}" for label in labels))
    for name, rule in rules.items():
        cells = []
        for label in labels:
            errors = [kept_aside(module, group, device, rule) for own, group, device in groups if own == label]
            cells.append(f"{shown(errors):>{width}}")
        print(f"{name:<22}" + " ".join(cells), flush=True)
    transfers(module, [(group, device) for _, group, device in groups])


def transfers(module: KernelModule, groups: list[tuple[Group, DeviceFacts]]) -> None:
    """Fitted on one device, predicted on another, for kernels that both have by the same name."""
    for group, source in groups:
        for other, target in groups:
            if source is not target and source.hardware.name != target.hardware.name and group.key == other.key:
                fit = transferred(module.fit(group, source), source, target)
                error = shown([np.abs(predict(other, fit, target) / other.seconds - 1)])
                print(f"  {source.hardware.name} -> {target.hardware.name}  {group.engine} {group.key}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    systems = sorted(path.name for path in arguments.folder.iterdir() if path.is_dir())
    for op in _TABLES:
        cross_validate(arguments.folder, systems, op, arguments.kernels)


if __name__ == "__main__":
    main()
