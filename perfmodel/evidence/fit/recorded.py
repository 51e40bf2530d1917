"""`perfmodel calibrate --from`: fits recorded measurements of any kind and writes files where they are looked up."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from perfmodel.cost import Calibration, EngineProfile, load_calibration, load_engine_profile, save_calibration
from perfmodel.cost.calibrations.backends import BackendFits
from perfmodel.cost.calibrations.for_all import load_exchange_fits
from perfmodel.cost.calibrations.whole_runs import OTHERS
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.acceptance import fit_catalog, read_acceptance
from perfmodel.evidence.fit.backends import fit_backends
from perfmodel.evidence.fit.collectives import DEEPEP, fit_deepep
from perfmodel.evidence.fit.device import ENGINE, fit_measured
from perfmodel.evidence.fit.few import choose, fit_few, kernels_of, write_chosen
from perfmodel.evidence.fit.layer_profile import fit_softmax, read_cards
from perfmodel.evidence.fit.parameters import with_facts
from perfmodel.evidence.fit.power import fit_power
from perfmodel.evidence.fit.profiles import (
    fit_engine_profile,
    fit_older_host,
    fit_popularity,
    fit_steady_profile,
    fitting_rows,
)
from perfmodel.evidence.fit.single_figures import fit_exchanges, fit_overheads, read_exchanges, read_overhead_rows
from perfmodel.evidence.fit.systems import calibrate_folder, fit_kernel_errors, fit_prior
from perfmodel.evidence.fit.whole_runs import fit_whole_runs
from perfmodel.evidence.observation import (
    ACCEPTED_LENGTHS,
    BATCHES,
    KERNEL_TABLES,
    LAYER_PROFILE,
    MEASURED_POWER,
    PUBLISHED_RESULTS,
    SERVING_RUNS,
    STEADY_STATES,
    Observation,
    Origin,
    Progress,
)
from perfmodel.evidence.sources.kernels import op_of, read_table, table_files
from perfmodel.evidence.sources.local import read_local_rows
from perfmodel.evidence.sources.measured import read_measurements
from perfmodel.evidence.sources.recorded import read_serving_runs
from perfmodel.evidence.sources.results import devices_folder, is_batch_table, read_mlperf_rows, read_served_rows
from perfmodel.evidence.sources.steady import read_energy_rows, read_steady_states
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import load_fitted, save_fitted
from perfmodel.specs import HardwareSpec, load_hardware
from perfmodel.specs.engine.description import describe_engine


def fit_recorded(
    path: Path, engine: str, out: Path | None = None, progress: Progress | None = None, is_forced: bool = False
) -> list[tuple[Calibration | EngineProfile | BackendFits, Path]]:
    """Fit what `path` holds and write it to the folder `out`, by default among the calibrations.

    A folder gives one calibration per device; a JSON of serving runs or a CSV of steady states gives the engine's
    profile, one of static batches the host of its older versions; a table of single-machine figures gives the engine's
    backends. is_forced: overwrite existing files

    Raises SpecError for unreadable measurements, those of another engine, and existing files."""
    if describe_engine(engine).facts.backends:
        file = _target(out, f"backend@{engine}.yaml", is_forced)
        command = f"perfmodel calibrate --from <local figures> --engine {engine}"
        backends = fit_backends(read_local_rows(path)[0], path.parent, engine, command)
        return [(backends, save_fitted(backends, file))]
    if path.is_dir():
        is_ours = (path / "suite.json").is_file()
        if is_ours and engine != ENGINE:
            raise SpecError(f"{path}: has measurements of engine {ENGINE!r}; got --engine {engine}.")
        calibrations = [fit_measured(read_measurements(path))] if is_ours else calibrate_folder(path, engine, progress)
        files = [_target(out, f"{c.device}@{c.engine}.yaml", is_forced) for c in calibrations]
        calibrations = [_beside_others(c, file) for c, file in zip(calibrations, files, strict=True)]
        return [(c, save_calibration(c, file)) for c, file in zip(calibrations, files, strict=True)]
    file = _target(out, f"engine@{engine}.yaml", is_forced)
    begin = with_facts(load_engine_profile(engine))
    if ".csv" in path.suffixes and is_batch_table(path):
        (profile, count), origin = fit_older_host(begin, read_served_rows(path)[0], devices_folder(path)), BATCHES
        what = f"{count} static batches of versions before {', '.join(profile.older)}"
    elif ".csv" in path.suffixes:
        rows, origin = read_steady_states(path)[0], STEADY_STATES
        num_rows = len(fitting_rows(rows, engine))
        if not num_rows:
            raise SpecError(f"{path}: has no rows of engine {engine!r} to fit")
        profile, what = fit_steady_profile(begin, rows, progress=progress), f"{num_rows:,} steady states of servers"
    else:
        rows, origin = read_serving_runs(path)[0], SERVING_RUNS
        what = f"{len({row.name for row in rows})} serving runs"
        profile = fit_engine_profile(begin, rows, progress=progress)
    # Parameters fitted from other recordings stay: each recording fits some of them.
    source, command = _joined(begin.source, origin, what), origin.command(f"--engine {engine}")
    profile = profile.model_copy(update={"source": source, "command": command, "date": today()})
    return [(profile, save_fitted(profile, file))]


def _joined(before: str, origin: Origin, what: str) -> str:
    """The source `before` with `what` in place of what it had of the same publisher."""
    others = [part for part in before.split("; ") if part and origin.publisher not in part]
    return "; ".join([*others, origin.source(what)])


def fit_chosen(
    path: Path, engine: str, count: int, hardware: HardwareSpec, out: Path | None, is_forced: bool
) -> tuple[Calibration | None, Path]:
    """The calibration of `hardware` by those `count` rows of its tables in `path` that say most, and its file in `out`;
    without tables of it, None and the folder of tables that say which of the rows there to measure.

    engine: whose kernels; is_forced: overwrite existing files. Raises SpecError as `fit_recorded` does."""
    own = [file.parent.name for file in table_files(path) if load_hardware(file.parent.name).name == hardware.name]
    name = f"{hardware.name}@{engine}.yaml" if own else hardware.name
    file = _target(out if own else out or Path("to-measure"), name, is_forced)
    kernels = kernels_of(path, engine, hardware, load_calibration(hardware, engine), own[0] if own else "*")
    chosen = choose(kernels, count)
    if not own:
        write_chosen(kernels, chosen, file)
        return None, file
    command = KERNEL_TABLES.command(f"--engine {engine} --rows {count} --hardware {hardware.name}")
    fitted = fit_few(kernels, chosen, hardware, engine, f"in {path.name}")
    fitted = fitted.model_copy(update={"command": command, "date": today()})
    return fitted, save_calibration(fitted, file)


_OF_PROFILES = ("attention_mixed", "elementwise")  # families that no kernel table has


def _beside_others(fitted: Calibration, file: Path) -> Calibration:
    """`fitted` with what the other kind of recording gave the file: a layer profile adds what larger tables lack."""
    before = load_fitted(Calibration, file) if file.is_file() else None
    publishers = (KERNEL_TABLES.publisher, LAYER_PROFILE.publisher)
    if before is None:
        return fitted
    tables, profile = (fitted, before) if publishers[0] in fitted.source else (before, fitted)
    if publishers[0] not in tables.source or publishers[1] not in profile.source:
        return fitted
    own = {key: fit for key, fit in tables.families.items() if key.split("/")[0] not in _OF_PROFILES}
    known = {key.split("/")[0] for key in own}
    families = own | {key: fit for key, fit in profile.families.items() if key.split("/")[0] not in known}
    sources = [part for c in (tables, profile) for part in c.source.split("; ") if any(p in part for p in publishers)]
    update = {"families": dict(sorted(families.items())), "source": "; ".join(dict.fromkeys(sources))}
    return tables.model_copy(update=update | {"default": profile.default, "date": fitted.date})


def _target(out: Path | None, name: str, is_forced: bool) -> Path:
    """The file to write. Raises SpecError if it exists, unless `is_forced`."""
    file = (out or data_dir("calibrations")) / name
    if file.exists() and not is_forced:
        raise SpecError(f"{file}: already exists; name another folder with --out, or overwrite it with --force.")
    return file


def fit_recorded_for_all(
    kind: str, path: Path, out: Path | None = None, progress: Progress | None = None, is_forced: bool = False
) -> tuple[Spec, Path]:
    """Fit `path` for all engines and devices alike, and write it as `fit_recorded` does.

    kind: of `FITS_FOR_ALL`
    out:  folder, by default among the calibrations; is_forced: overwrite an existing file

    Raises SpecError without data of the kind."""
    file = _target(out, f"{'overheads' if kind == 'softmax' else kind}.yaml", is_forced)
    fits, provenance = FITS_FOR_ALL[kind](path, progress)
    fits = fits.model_copy(update={**provenance, "date": today()})
    return fits, save_calibration(fits, file) if isinstance(fits, Calibration) else save_fitted(fits, file)


_Fitted = tuple[Spec, dict[str, str]]  # and where it comes from; what is not in it stays as it is


def _from(origin: Origin, what: str, flag: str) -> dict[str, str]:
    return {"source": origin.source(what), "command": origin.command(flag)}


def _routing(path: Path, progress: Progress | None) -> _Fitted:
    fit = fit_popularity(read_steady_states(path)[0], progress=progress)
    return fit, _from(STEADY_STATES, "steady states of servers", "--routing")


def _whole_runs(path: Path, progress: Progress | None) -> _Fitted:
    rows: list[Observation] = []
    for table in sorted(path.glob("*.csv*")) if path.is_dir() else [path]:
        for read in (read_mlperf_rows, read_served_rows):
            with suppress(SpecError):
                rows += read(table)[0]
                break
    fits = fit_whole_runs(rows, devices_folder(path), progress)
    settings = sum(fit.rows for name, fit in fits.architectures.items() if name not in OTHERS.values())
    return fits, _from(PUBLISHED_RESULTS, f"{settings} settings of serving results", "--whole-runs")


def _overheads(path: Path, *_: object) -> _Fitted:
    rows, before = read_overhead_rows(path), load_overheads()
    ours = [part for part in before.source.split("; ") if LAYER_PROFILE.publisher in part]
    source = "; ".join([*dict.fromkeys(row.source for row in rows), *ours])
    command = "perfmodel calibrate --from <single figures> --overheads"
    return fit_overheads(rows, before.softmax_ops), {"source": source, "command": command}


def _softmax(path: Path, *_: object) -> _Fitted:
    before, cards = load_overheads(), read_cards(path)
    source = _joined(before.source, LAYER_PROFILE, f"layer profiles of {len(cards)} cards")
    return before.model_copy(update={"softmax_ops": fit_softmax(cards)}), {"source": source}


def _exchange(path: Path, *_: object) -> _Fitted:
    begin = load_exchange_fits()
    if not path.is_dir():
        return fit_exchanges(read_exchanges(path), begin), {}
    tables = [read_table(file) for file in table_files(path) if op_of(file) in DEEPEP]
    if not tables:
        raise SpecError(f"{path}: has no tables {' or '.join(DEEPEP)}.")
    what = f"{sum(map(len, tables)):,} times of DeepEP's kernels on up to 8 nodes"
    return begin.model_copy(update=fit_deepep(tables)), {"source": _joined(begin.source, KERNEL_TABLES, what)}


def _power(path: Path, *_: object) -> _Fitted:
    rows, _left_out = read_energy_rows(path)
    return fit_power(rows), _from(MEASURED_POWER, f"power of {len(rows)} deployments", "--power")


def _acceptance(path: Path, *_: object) -> _Fitted:
    rows, _unread = read_acceptance(path)
    return fit_catalog(rows), _from(ACCEPTED_LENGTHS, f"{len(rows)} mean accepted lengths of drafts", "--acceptance")


_OF_ERRORS = _from(KERNEL_TABLES, "residuals of kernel tables", "--kernel-errors")
# What is fitted for all engines and devices alike, by the flag of `calibrate` that asks for it.
FITS_FOR_ALL: Mapping[str, Callable[[Path, Progress | None], _Fitted]] = MappingProxyType(
    {
        "acceptance": _acceptance,
        "exchange": _exchange,
        "kernel_errors": lambda path, _: (fit_kernel_errors(path), _OF_ERRORS),
        "overheads": _overheads,
        "power": _power,
        "prior": lambda *given: (fit_prior(*given), {"command": KERNEL_TABLES.command("--prior")}),
        "routing": _routing,
        "softmax": _softmax,
        "whole_runs": _whole_runs,
    }
)
