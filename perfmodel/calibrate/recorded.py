"""`perfmodel calibrate --from`: recorded measurements of any kind, fitted and written where they are looked for."""

__all__ = ["fit_recorded"]

import datetime
from collections.abc import Callable
from pathlib import Path

from perfmodel.calibrate.engine_profile import fit_engine_profile
from perfmodel.calibrate.kernels import calibrate_folder
from perfmodel.calibrate.serving_runs import read_serving_runs
from perfmodel.calibrate.steady_profile import fit_steady_profile, fitting_rows
from perfmodel.calibrate.steady_state import read_steady_states
from perfmodel.cost import Calibration, EngineProfile, load_engine_profile, save_calibration, save_engine_profile
from perfmodel.errors import SpecError
from perfmodel.specs.catalog import data_dir

Progress = Callable[[int, int | None], None]


def fit_recorded(
    path: Path, engine: str, out: Path | None = None, command: str = "", progress: Progress | None = None
) -> list[tuple[Calibration | EngineProfile, Path]]:
    """Fit what `path` holds and write it to the folder `out`, by default among the calibrations.

    A folder gives one calibration per device; a JSON file of serving runs, or a CSV of steady states, what it tells of
    the engine's profile. Raises SpecError for measurements that cannot be read, or are of another engine.
    """
    folder = out or data_dir("calibrations")
    if path.is_dir():
        calibrations = calibrate_folder(path, engine, command, progress)
        return [(c, save_calibration(c, folder / f"{c.device}@{c.engine}.yaml")) for c in calibrations]
    fit = _steady_states if ".csv" in path.suffixes else _serving_runs
    profile = fit(path, load_engine_profile(engine), progress)
    profile = profile.model_copy(update={"date": datetime.date.today(), "command": command})
    return [(profile, save_engine_profile(profile, folder / f"engine@{engine}.yaml"))]


def _serving_runs(path: Path, begin: EngineProfile, progress: Progress | None) -> EngineProfile:
    runs, _ = read_serving_runs(path)
    source = f"{len(runs)} runs in {path.name} (inference-sim/sim-to-real-accuracy-validation)"
    return fit_engine_profile(begin, runs, progress=progress).model_copy(update={"source": source})


def _steady_states(path: Path, begin: EngineProfile, progress: Progress | None) -> EngineProfile:
    rows, _ = read_steady_states(path)
    if not fitting_rows(rows, begin.engine):
        raise SpecError(f"{path}: has no rows of engine {begin.engine!r} to fit")
    return fit_steady_profile(begin, rows, progress=progress)
