"""`perfmodel calibrate --from`: recorded measurements of any kind, fitted and written where they are looked for."""

__all__ = ["fit_recorded"]

import datetime
from collections.abc import Callable
from pathlib import Path

from perfmodel.calibrate.engine_profile import fit_engine_profile
from perfmodel.calibrate.kernels import calibrate_folder
from perfmodel.calibrate.serving_runs import read_serving_runs
from perfmodel.cost import Calibration, EngineProfile, save_calibration, save_engine_profile
from perfmodel.specs.catalog import data_dir

Progress = Callable[[int, int | None], None]


def fit_recorded(
    path: Path, engine: str, out: Path | None = None, command: str = "", progress: Progress | None = None
) -> list[tuple[Calibration | EngineProfile, Path]]:
    """Fit what `path` holds and write it to the folder `out`, by default among the calibrations.

    A folder gives one calibration per device, a JSON file of serving runs the profile of the engine. Raises SpecError
    for measurements that cannot be read, or are of another engine.
    """
    folder = out or data_dir("calibrations")
    if path.is_dir():
        calibrations = calibrate_folder(path, engine, command, progress)
        return [(c, save_calibration(c, folder / f"{c.device}@{c.engine}.yaml")) for c in calibrations]
    runs, _ = read_serving_runs(path)
    profile = fit_engine_profile(engine, runs, progress=progress).model_copy(
        update={
            "source": f"{len(runs)} runs in {path.name} (inference-sim/sim-to-real-accuracy-validation)",
            "date": datetime.date.today(),
            "command": command,
        }
    )
    return [(profile, save_engine_profile(profile, folder / f"engine@{engine}.yaml"))]
