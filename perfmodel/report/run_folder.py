"""The folder of a run's files: an earlier run's stay until the new one's are all there, and no other file is touched.

In a folder without an earlier run the new one's records can be read while it goes. Otherwise they come to be in
`unfinished` below it, and move up together at the end.
"""

__all__ = ["RUN_FILES", "RunFolder"]

from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.files.reach import read_json
from perfmodel.sim.records.collector import REQUEST_COLUMNS, STEP_COLUMNS

RUN_FILES = (
    "requests.csv",
    "steps.csv",
    "chunks.csv",
    "acceptance.json",
    "result.json",
    "report.html",
    "timeline.json",
)
_HEADERS = {"requests.csv": REQUEST_COLUMNS, "steps.csv": STEP_COLUMNS}


class RunFolder:
    """path: where the files end up; work: where they are written. Made at once.

    Raises SpecError where it cannot be made or written, or has a file of such a name that no run has written.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.work = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any((path / name).exists() for name in RUN_FILES):
                _refuse_files_of_others(path)
                self.work = path / "unfinished"
                self.work.mkdir(exist_ok=True)
        except OSError as error:
            raise SpecError(f"--out {path}: {error.strerror or error}; give a folder that can be written.") from None

    def finish(self) -> None:
        """Put the new files in the place of the old ones."""
        if self.work == self.path:
            return
        for name in RUN_FILES:
            if (self.work / name).exists():
                (self.work / name).replace(self.path / name)
            else:
                (self.path / name).unlink(missing_ok=True)
        self.work.rmdir()

    def give_up(self) -> None:
        """Leave an earlier run as it was."""
        if self.work == self.path:
            return
        for name in RUN_FILES:
            (self.work / name).unlink(missing_ok=True)
        self.work.rmdir()


def _refuse_files_of_others(folder: Path) -> None:
    if _has_provenance(folder / "result.json"):
        return
    for name in RUN_FILES:
        file = folder / name
        if file.exists() and not (name in _HEADERS and _begins_with(file, _HEADERS[name])):
            raise SpecError(
                f"--out {folder}: found {name}, which no run of perfmodel has written, and would replace it; give "
                f"another folder."
            )


def _has_provenance(file: Path) -> bool:
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and isinstance(found.get("provenance"), dict)


def _begins_with(file: Path, columns: tuple[str, ...]) -> bool:
    """Whether a file of records has these columns first, or, of a run that was cut short, nothing yet."""
    wanted = ",".join(columns).encode()
    with file.open("rb") as records:
        return records.read(len(wanted)) in (wanted, b"")
