"""What `calibrate --from FILE... --name NAME` does: one's own server, fitted to its load tests and written by name."""

__all__ = ["DEFAULT_FOLDER", "OwnServer", "fit_to_load_tests"]

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
    from perfmodel.report.views.bench import own_server_view

    give(Answer(lambda: {**fit.to_json(), "path": str(file)}, lambda: own_server_view(fit)), as_json)
    say(f"Written to {file}; `engine.profile: {asked.name}` uses it.")
