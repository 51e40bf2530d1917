"""Kernels of a device that nobody has measured, from few rows that are chosen to say most.

A kernel begins at what the device has without rows, a relation's fit or that of all architectures together. The
logarithm of each parameter moves by a shift of its family (products, prompts, decodes, experts) and one of its own:

    log p = log p0 + f + 0.7 k,    f and k ~ N(0, 0.8^2)

so rows of one format say something of others. Rows are chosen one by one: next the one that takes most off the mean
variance of log t over all candidates, with derivatives at the beginning and an error of 12 % a row. Source: Bayesian
experimental design (Chaloner and Verdinelli, Statistical Science 10, 1995, section 2.2, psi_A)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import Calibration, load_calibration
from perfmodel.cost.calibrations.draws import Z_P90
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.kernels import Floats, fitted_names, moved, predict
from perfmodel.evidence.fit.systems import GENERIC_SMALL, OF_PRIOR, bare_key, groups_of, key_of
from perfmodel.evidence.sources.kernels import Group, KernelTable, op_of, read_table, table_files, version_order
from perfmodel.specs import HardwareSpec, load_hardware

_SHIFT, _OWN, _ERROR = 0.8, 0.7, 0.12
_STEP = 0.1  # of a logarithm, for derivatives
_CANDIDATES = 600  # of a family


class Kernel(NamedTuple):
    """A kernel's rows in a table, and its fit where the device has no rows."""

    table: KernelTable
    group: Group
    begin: Any


class _Family(NamedTuple):
    """Kernels that share shifts of the parameters `names`; candidates: (kernel, row); slopes: of log t of each
    candidate by the family's shifts, then by those of every kernel"""

    kernels: list[Kernel]
    names: tuple[str, ...]
    candidates: list[tuple[int, int]]
    slopes: Floats


Chosen = Mapping[str, Sequence[tuple[int, int]]]  # by family: (kernel, row)


def without_architecture(hardware: HardwareSpec, engine: str) -> Calibration:
    """What `hardware` has under `engine` where nobody has measured its architecture."""
    own = hardware.declared.architecture or hardware.name
    return load_calibration(hardware, engine, without=lambda d, _: load_hardware(d).declared.architecture == own)


def kernels_of(
    path: Path, engine: str, hardware: HardwareSpec, begin: Calibration, system: str = "*"
) -> dict[str, list[Kernel]]:
    """By operator, kernels of the newest version of `engine` in the tables of `path`, as if on `hardware`. begin: its
    fits without rows; system: whose tables, of the folder's. Raises SpecError without any."""
    result: defaultdict[str, list[Kernel]] = defaultdict(list)
    files = (file for file in table_files(path) if fnmatch(file.parent.name, system))
    for file in (file for file in files if op_of(file) in OF_PRIOR):
        table = read_table(file).sampled(_CANDIDATES)
        groups = [group for group in groups_of(table, file, hardware) if group.engine == engine]
        newest = max((group.version for group in groups), key=version_order, default="")
        for group in (group for group in groups if group.version == newest):
            key = key_of(group, begin)
            if key is not None:
                result[op_of(file)].append(Kernel(table, group, (begin.families | begin.others)[key]))
    if not result:
        raise SpecError(f"{path}: has no rows of engine {engine!r} in tables of {', '.join(OF_PRIOR)}.")
    return dict(result)


def choose(kernels: Mapping[str, list[Kernel]], count: int) -> Chosen:
    """The `count` rows that say most of all. kernels: see `kernels_of`"""
    families = {name: _family(some) for name, some in kernels.items()}
    variances = {name: _SHIFT**2 * np.eye(family.slopes.shape[1]) for name, family in families.items()}
    chosen: dict[str, list[tuple[int, int]]] = {name: [] for name in families}
    for _ in range(min(count, sum(len(family.candidates) for family in families.values()))):
        best: tuple[float, str, int] = (-1.0, "", 0)
        for name, family in families.items():
            together = family.slopes @ variances[name] @ family.slopes.T
            gain = (together**2).mean(axis=1) / (_ERROR**2 + np.diag(together))
            gain[[family.candidates.index(row) for row in chosen[name]]] = -1.0
            best = max(best, (float(gain.max()), name, int(gain.argmax())))
        _, name, row = best
        chosen[name].append(families[name].candidates[row])
        slope = families[name].slopes[row]
        spread = variances[name] @ slope
        variances[name] = variances[name] - np.outer(spread, spread) / (_ERROR**2 + slope @ spread)
    return chosen


def _family(kernels: list[Kernel]) -> _Family:
    of_each = [fitted_names(kernel.begin) for kernel in kernels]
    names = tuple(name for name in of_each[0] if all(name in fitted for fitted in of_each))
    rows = [(number, row) for number, kernel in enumerate(kernels) for row in range(len(kernel.group.rows))]
    some = np.random.default_rng(0).permutation(len(rows))[:_CANDIDATES]
    candidates = [rows[row] for row in np.sort(some)]
    slopes = []
    for group, begin in ((kernel.group, kernel.begin) for kernel in kernels):
        times = [np.log(predict(group, moved(begin, {name: _STEP}))) for name in names]
        slopes.append((np.array(times) - np.log(predict(group, begin))).T / _STEP)
    own = np.zeros((len(candidates), (1 + len(kernels)) * len(names)))
    for line, (number, row) in zip(own, candidates, strict=True):
        line[: len(names)] = slopes[number][row]
        line[(1 + number) * len(names) :][: len(names)] = _OWN * slopes[number][row]
    return _Family(kernels, names, candidates, own)


def write_chosen(kernels: Mapping[str, list[Kernel]], chosen: Chosen, folder: Path) -> None:
    """Tables `folder/<op>.csv` of the `chosen` rows of `kernels`, whose times are to be measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for op, rows in ((op, rows) for op, rows in chosen.items() if rows):
        tables = [kernels[op][number].table.take(kernels[op][number].group.rows[[row]]) for number, row in rows]
        names = [name for name in tables[0].columns if name not in ("latency_ms", "power", "power_limit", "device")]
        lines = [",".join([*names, "latency_ms"])]
        lines += [",".join([*(str(table[name][0]) for name in names), ""]) for table in tables]
        (folder / f"{op}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def fit_few(
    kernels: Mapping[str, list[Kernel]], chosen: Chosen, hardware: HardwareSpec, engine: str, origin: str = ""
) -> Calibration:
    """The calibration of `hardware` under `engine` from the `chosen` rows of `kernels`, which `origin` names."""
    families: dict[str, Any] = {}
    for name, some in kernels.items():
        for kernel, fit in zip(some, fitted(_family(some), chosen[name]), strict=True):
            key = bare_key(kernel.group.key)
            families[key if key not in families else kernel.group.key] = fit
    what = f"{sum(map(len, chosen.values()))} kernel times of {len(families)} kernels on {hardware.name} {origin}"
    source, families = what.strip(), dict(sorted(families.items()))
    return Calibration(device=hardware.name, engine=engine, source=source, default=GENERIC_SMALL, families=families)


def fitted(family: _Family, chosen: Sequence[tuple[int, int]]) -> list[Any]:
    """The fits of a family's kernels to the `chosen` rows. Residuals are those of rows not chosen, as the posterior has
    them, and at least those of the chosen."""
    from scipy.optimize import least_squares

    count, width = len(family.names), family.slopes.shape[1]
    parts = [
        (number, family.kernels[number].group.take(np.array([row for of, row in chosen if of == number], dtype=int)))
        for number in sorted({number for number, _ in chosen})
    ]

    def fit_of(number: int, shifts: Floats) -> Any:
        own = shifts[:count] + _OWN * shifts[(1 + number) * count :][:count]
        return moved(family.kernels[number].begin, dict(zip(family.names, own.tolist(), strict=True)))

    def errors(shifts: Floats) -> Floats:
        of_rows = [np.log(predict(group, fit_of(number, shifts)) / group.seconds) for number, group in parts]
        return np.concatenate([*(some / _ERROR for some in of_rows), shifts / _SHIFT])

    search = least_squares(errors, np.zeros(width), loss="soft_l1", diff_step=1e-2, max_nfev=40)
    rows: NDArray[np.float64] = family.slopes[[family.candidates.index(row) for row in chosen]]
    precision = rows.T @ rows / _ERROR**2 + np.eye(width) / _SHIFT**2
    unknown = float(np.mean(np.einsum("ij,ji->i", family.slopes, np.linalg.solve(precision, family.slopes.T))))
    seen = float(np.median(np.abs(search.fun[: len(chosen)]))) * _ERROR * 1.48 if chosen else 0.0
    end = round(Z_P90 * (unknown + max(seen, _ERROR) ** 2) ** 0.5, 5)
    residuals = Residuals(num_rows=len(chosen), p10=-end, p90=end)
    return [fit_of(place, search.x).model_copy(update={"residuals": residuals}) for place in range(len(family.kernels))]
