"""The results folder of the suite: every finished task is on disk before the next one begins, and is not run again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError

_DIGITS = 7  # significant: more than any measurement is good for


class Results:
    """Records by part and key: `<part>.json` is an object of records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--out {folder}: {error.strerror}; name a folder that can be written.") from None
        self._records: dict[str, dict[str, Any]] = {}

    def has(self, part: str, key: str) -> bool:
        """Whether the task was measured, now or in an earlier run."""
        return key in self.part(part)

    def part(self, part: str) -> dict[str, Any]:
        """All records of a part."""
        if part not in self._records:
            self._records[part] = self._read(part)
        return self._records[part]

    def put(self, part: str, key: str, record: Mapping[str, Any]) -> None:
        """Keep a record, on disk before this returns."""
        self.part(part)[key] = _compact(dict(record))
        self.write(f"{part}.json", self._records[part])

    def write(self, name: str, data: Any) -> None:
        """A file as a whole: an interrupted run leaves the old one."""
        path = self.folder / name
        text = json.dumps(data, separators=(",", ":")).replace('},"', '},\n"')
        temporary = path.with_suffix(".part")
        temporary.write_text(text + "\n", encoding="utf-8", newline="\n")
        temporary.replace(path)

    def info(self) -> dict[str, Any]:
        """What an earlier run wrote of itself, if there was one."""
        return self._read("suite")

    def _read(self, part: str) -> dict[str, Any]:
        path = self.folder / f"{part}.json"
        if not path.is_file():
            return {}
        try:
            records: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: cannot be read ({error}); move it away to begin anew.") from None
        return records


def _compact(value: Any) -> Any:
    """Floats to the digits that mean something."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _compact(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_compact(part) for part in value]
    return value
