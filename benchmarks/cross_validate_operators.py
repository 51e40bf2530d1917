"""Cross-validation of GEMM and mixture-of-experts fits: median / p90 absolute error (%) on rows that no fit has seen.

    python benchmarks/cross_validate_operators.py FOLDER

FOLDER has kernel tables `<system>/gemm.parquet` and `<system>/moe.parquet`. Each column is a way of keeping rows aside:
half of the shapes, whole models, a range of sizes. The last tables are transfers between systems: with nothing of the
target but its declared figures, then with its kernels' own generation constants, then with its launch time, too.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.evidence.fit.kernels import KernelModule, predict
from perfmodel.evidence.fit.products import GEMM, MOE, experts_too_fast, gemms_too_fast
from perfmodel.evidence.sources.kernels import Group, read_table
from perfmodel.specs import load_hardware

Rows = NDArray[np.bool_]
Errors = NDArray[np.float64]
Folds = Callable[[Any], list[Rows]]

_FEWEST_ASIDE, _FEWEST_FITTED = 50, 200
_GENERATION = ("tile_s", "wave_quantization")  # how a generation of kernels is written: persistent or not


def _half_of(*names: str) -> Folds:
    """Half of the distinct values of some sizes."""

    def folds(sizes: Any) -> list[Rows]:
        which = _numbered(sizes, names)
        return [np.random.default_rng(1).random(which.max() + 1)[which] < 0.5]

    return folds


def _two_folds(*names: str) -> Folds:
    """Every second value of some sizes, then the others."""

    def folds(sizes: Any) -> list[Rows]:
        which = _numbered(sizes, names)
        return [which % 2 == 0, which % 2 == 1] if which.max() >= 3 else []

    return folds


def _where(rule: Callable[[Any], Rows]) -> Folds:
    return lambda sizes: [np.asarray(rule(sizes))]


def _numbered(sizes: Any, names: Sequence[str]) -> NDArray[np.int64]:
    values = np.column_stack([getattr(sizes, name) for name in names])
    return np.unique(values, axis=0, return_inverse=True)[1].ravel()


_RULES: dict[str, tuple[KernelModule, dict[str, Folds]]] = {
    "gemm": (
        GEMM,
        {
            "half of (N, K)": _half_of("n", "k"),
            "M > 4353": _where(lambda s: s.m > 4353),
            "M <= 8": _where(lambda s: s.m <= 8),
            "N|K >= 16384": _where(lambda s: (s.n >= 16384) | (s.k >= 16384)),
        },
    ),
    "moe": (
        MOE,
        {
            "half of shapes": _half_of("width", "inner", "top_k", "num_experts", "local_experts"),
            "models": _two_folds("width", "top_k", "num_experts"),
            "tokens > 4096": _where(lambda s: s.tokens > 4096),
            "tokens <= 8": _where(lambda s: s.tokens <= 8),
            "EP >= 16": _where(lambda s: s.num_experts >= 16 * s.local_experts),
        },
    ),
}


def errors_of(module: KernelModule, group: Group, fit: Any, device: DeviceFacts) -> Errors:
    return np.asarray(np.abs(predict(group, fit, device) / group.seconds - 1))


def kept_aside(module: KernelModule, group: Group, device: DeviceFacts, folds: Folds) -> Errors:
    """Errors on the rows kept aside, fitted on the rest; none where either is too small."""
    result = [np.empty(0)]
    for rows in folds(group.sizes.problem):
        if rows.sum() >= _FEWEST_ASIDE and (~rows).sum() >= _FEWEST_FITTED:
            fit = module.fit(group.take(~rows), device)
            result.append(errors_of(module, group.take(rows), fit, device))
    return np.concatenate(result)


def shown(errors: Errors) -> str:
    return f"{100 * np.median(errors):.1f}/{100 * np.quantile(errors, 0.9):.1f}" if len(errors) else "-"


def print_line(name: str, cells: Sequence[str]) -> None:
    print(f"{name:<36}" + "".join(f"{cell:>15}" for cell in cells), flush=True)


def cross_validate(op: str, groups: list[tuple[str, DeviceFacts, Group]]) -> None:
    """One table: kernels down, ways of keeping rows aside across; then each system in all."""
    module, rules = _RULES[op]
    print_line(f"\n{op}", list(rules))
    totals: dict[str, list[list[Errors]]] = {}
    for system, device, group in groups:
        result = [kept_aside(module, group, device, folds) for folds in rules.values()]
        totals.setdefault(system, []).append(result)
        print_line(f"{system} {group.engine} {group.key}", [shown(errors) for errors in result])
    for system, lines in totals.items():
        print_line(f"{system}: all", [shown(np.concatenate(column)) for column in zip(*lines, strict=True)])
    for system, device, group in groups:
        too_fast = (gemms_too_fast if module is GEMM else experts_too_fast)(group, device)
        if too_fast.any():
            print(f"  {system} {group.engine} {group.key}: {too_fast.sum()} rows beat the hardware, not fitted")


def transfer(op: str, groups: list[tuple[str, DeviceFacts, Group]]) -> None:
    """The same format from one system to another, with more and more of the target's own parameters."""
    module, _ = _RULES[op]
    steps: tuple[tuple[str, ...], ...] = ((), _GENERATION, (*_GENERATION, "launch_s"))
    print_line(f"\n{op}: transfer", ["declared only", "+ generation", "+ launch"])
    fits = {id(group): module.fit(group, device) for _, device, group in groups}
    for system, _, group in groups:
        for other_system, device, other in groups:
            if system != other_system and group.key == other.key and group.key.endswith("/bf16"):
                fit, own = fits[id(group)], fits[id(other)]
                kept = {"tile_rule": own.tile_rule}
                mixed = [fit.model_copy(update=kept | {name: getattr(own, name) for name in step}) for step in steps]
                cells = [shown(errors_of(module, other, item, device)) for item in mixed]
                print_line(f"{system} {group.engine} -> {other_system} {other.engine}", cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for op, (module, _) in _RULES.items():
        groups = []
        for file in sorted(folder.glob(f"*/{op}.parquet")):
            system = file.parent.name
            device = DeviceFacts.of(load_hardware(system))
            groups += [(system, device, group) for group in module.groups(read_table(file), device)]
        if groups:
            cross_validate(op, groups)
            transfer(op, groups)


if __name__ == "__main__":
    main()
