"""`Journal`: the pairs that are finished, one line each, so that a session of most of an hour that is cut off goes on.

A line is taken up again only if both scenarios and the number of runs are what they were; the file is removed once the
report is written.
"""

__all__ = ["Journal"]

import hashlib
import json
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.files.bounded import LARGEST_TABLE_BYTES, parse_json, read_bounded_text
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.techniques.runs import TechniqueRun


class Journal:
    """path: the file of lines; None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[TechniqueRun]] = {}
        if path is not None and path.is_file():
            for line in read_bounded_text(path, LARGEST_TABLE_BYTES).splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            row = parse_json(line)
            self._known[row["key"]] = [TechniqueRun.from_json(run) for run in row["runs"]]
        except (ValueError, KeyError, TypeError):
            pass  # the line that was being written when it was cut off

    def find(self, scenario: Scenario, baseline: Scenario, repeats: int) -> list[TechniqueRun] | None:
        """The runs of this pair, if it was finished."""
        return self._known.get(_key(scenario, baseline, repeats))

    def add(self, file: str, scenario: Scenario, baseline: Scenario, runs: list[TechniqueRun]) -> None:
        """Append the finished pair of `scenario` (of `file`) and `baseline`, with its `runs`.

        Raises SpecError if the journal cannot be written.
        """
        if self._path is None:
            return
        key = _key(scenario, baseline, len(runs))
        line = json.dumps({"file": file, "key": key, "runs": [run.to_json() for run in runs]})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(f"\n{line}\n")  # after a cut-off line too, one of its own
        except OSError as error:
            raise SpecError(f"{self._path}: cannot be written: {error.strerror}.") from None

    def remove(self) -> None:
        """Forget everything: the report is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _key(scenario: Scenario, baseline: Scenario, repeats: int) -> str:
    text = "\n".join((scenario.model_dump_json(), baseline.model_dump_json(), str(repeats)))
    return hashlib.sha256(text.encode()).hexdigest()
