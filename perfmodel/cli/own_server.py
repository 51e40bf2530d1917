"""What `calibrate --name NAME` does, fitted and written by name: one's own server, to its load tests (`--from`); one's
own device under an engine, to runs of scenarios on it (`--on`)."""

__all__ = ["DEFAULT_FOLDER", "OwnServer", "fit_to_engine", "fit_to_load_tests"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfmodel.answers.answer import Answer
from perfmodel.cli.terminal import give, progress_bar, say
from perfmodel.errors import SpecError

DEFAULT_FOLDER = "calibrations"


@dataclass(frozen=True)
class OwnServer:
    """What was asked for.

    name:      that `engine.profile` will find it by; engine: whose shipped profile it begins from
    files:     results of load tests
    scenario, flags, overrides: what says which deployment they are of
    folder:    to write to; is_forced: over a file that is there
    """

    name: str
    engine: str
    files: Sequence[Path]
    scenario: str | None
    flags: Mapping[str, str]
    overrides: Sequence[str]
    folder: Path
    is_forced: bool


def fit_to_load_tests(asked: OwnServer, as_json: bool) -> None:
    """Fit, write and say what came of it. Raises SpecError for files that cannot be fitted to, before any work for a
    calibration that is there already."""
    from perfmodel.calibrate.bench.recognise import read_bench_files
    from perfmodel.calibrate.bench.scenarios import GivenSetup
    from perfmodel.calibrate.own_server import fit_own_server, refuse_written, save_own_server

    refuse_written(asked.name, asked.folder, asked.is_forced)
    if asked.scenario is not None and asked.flags:
        raise SpecError(
            f"--scenario beside --{next(iter(asked.flags))}: the scenario says what was served; change it with --set."
        )
    runs, unread = read_bench_files(asked.files)
    given = GivenSetup(asked.scenario, asked.flags, asked.overrides)
    with progress_bar("fitting") as progress:
        fit = fit_own_server(asked.name, runs, given, asked.engine, progress, unread)
    file = save_own_server(fit, asked.folder, asked.is_forced)
    from perfmodel.report.views.validation import own_server_view

    give(Answer(lambda: {**fit.to_json(), "path": str(file)}, lambda: own_server_view(fit)), as_json)
    say(f"Written to {file}; `engine.profile: {asked.name}` uses it.")


def fit_to_engine(target: str, scenarios: Sequence[str], asked: OwnServer, as_json: bool) -> None:
    """Run the scenarios on the engine that `target` names, fit their steps, write both files that `asked.name` finds.

    Raises SpecError where there are no scenarios, or files of that name are there already.
    """
    from perfmodel.calibrate.own_server import refuse_written
    from perfmodel.cost import EngineProfile, save_calibration, save_engine_profile
    from perfmodel.report.views.validation import calibration_view
    from perfmodel.specs import load_scenario
    from perfmodel.specs.engine.reading import device_file
    from perfmodel.specs.scenario_file import named_model
    from perfmodel.validate.executed.bridge import load_executor

    profile_file = refuse_written(asked.name, asked.folder, asked.is_forced)
    if not scenarios:
        raise SpecError(
            f"--on {target}: give the scenarios to run, as in calibrate --on {target} chat.yaml --name mine."
        )
    loaded = [(load_scenario(each, asked.overrides), named_model(each, asked.overrides)) for each in scenarios]
    with progress_bar("running") as progress:
        calibration = load_executor(needs_torch=False).calibrate_on(target, loaded, progress)
    profile = EngineProfile(
        engine=calibration.engine, name=asked.name, source=calibration.source, date=calibration.date
    )
    file = save_calibration(calibration, device_file(profile_file, calibration.device))
    save_engine_profile(profile, profile_file)
    fitted = {**calibration.model_dump(mode="json"), "path": str(file), "profile_path": str(profile_file)}
    give(Answer(lambda: fitted, lambda: calibration_view(calibration)), as_json)
    say(f"Written to {profile_file} and {file}; `engine.profile: {asked.name}` uses them.")
