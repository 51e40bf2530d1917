"""Path sandbox and size limits for reading users' files.

Within `restrict_paths` only the catalogue and allowed folders (uploads) are accessible: browser addresses are
untrusted, so a path is refused before any disk or network access. Limits hold in their context (`contextvars`) and
its workers. Every reader of a user's file goes through here; an oversized file (a device, a bomb) is an `OSError`."""

import errno
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from perfmodel.errors import SpecError

PACKAGE = Path(__file__).resolve().parent.parent
_OWN = (PACKAGE / "_data", *(PACKAGE.parent / name for name in ("hardware_specs", "workloads", "reports")))
_ALLOWED: ContextVar[tuple[Path, ...] | None] = ContextVar("allowed", default=None)
# From the root, a user's folder or here, up a folder, a drive, a Windows path; or what only files are called.
_PATH_LIKE = re.compile(r"[/~]|\.{1,2}([/\\]|$)|.*[/\\]\.\.([/\\]|$)|[A-Za-z]:|.*\\|.*\0", re.DOTALL)
_SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".gguf", ".safetensors", ".csv", ".txt", ".gz")
_LONGEST = 80  # characters of a refused name


@contextmanager
def restrict_paths(allowed: Sequence[str | Path] = ()) -> Iterator[None]:
    """Context in which names are the catalogue's or files below `allowed`; others raise SpecError."""
    token = _ALLOWED.set(tuple(Path(os.path.abspath(folder)) for folder in allowed))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def allow_path(folder: Path) -> AbstractContextManager[None]:
    """Context that also allows files below `folder`: a cache addressed by names only."""
    allowed = _ALLOWED.get()
    return nullcontext() if allowed is None else restrict_paths((*allowed, folder))


def is_only_names() -> bool:
    """Whether files and the network are refused here."""
    return _ALLOWED.get() is not None


def is_allowed(path: str | Path) -> bool:
    """Whether `path` may be accessed. Links do not escape an allowed folder."""
    allowed = _ALLOWED.get()
    if allowed is None:
        return True
    text = str(path)
    if "\0" in text or not _is_below(os.path.abspath(text), (*allowed, *_OWN)):
        return False
    return _is_below(os.path.realpath(text), [os.path.realpath(folder) for folder in (*allowed, *_OWN)])


def _is_below(path: str, folders: Sequence[str | Path]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def refuse_path(name: str | Path) -> None:
    """Raise SpecError for a forbidden file path."""
    text = str(name)
    is_path = isinstance(name, Path) or _PATH_LIKE.match(text) or text.lower().endswith(_SUFFIXES)
    if is_path and not is_allowed(name):
        raise refused(text)


def refused(name: str) -> SpecError:
    """Error for a name that may not be looked up as a path."""
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    return SpecError(f"{shown!r} names a file; here only names of the catalog are allowed: drop the file on the page.")


def within_reach(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `function` to keep the present limits in another process."""
    allowed = _ALLOWED.get()
    return function if allowed is None else partial(_call_within, function, allowed)


def _call_within(function: Callable[[Any], Any], allowed: tuple[Path, ...], item: Any) -> Any:
    with restrict_paths(allowed):
        return function(item)


# Parsed JSON takes some twenty times its size: half a gigabyte. The largest index of weights has 9 MB (DeepSeek-V3).
LARGEST_JSON_BYTES = 32_000_000
# Recorded measurements, unpacked: the largest published ones have some 20 MB.
LARGEST_TABLE_BYTES = 256_000_000
_LONGEST_LINE = 10_000_000  # characters: a request whose prompt has a million blocks
_GZIP = 31  # zlib's code for a gzip header around the deepest window


def read_limited(path: pathlib.Path, most_bytes: int) -> bytes:
    """File bytes. Raises OSError, also beyond `most_bytes`; SpecError for a forbidden file."""
    refuse_path(path)
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def read_limited_text(path: pathlib.Path, most_bytes: int) -> str:
    """UTF-8 text with normalised line ends. Raises OSError and UnicodeDecodeError."""
    text = read_limited(path, most_bytes).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: pathlib.Path, most_bytes: int = LARGEST_JSON_BYTES, is_strict: bool = False) -> Any:
    """JSON of up to `most_bytes`. Raises OSError, and ValueError as `parse_json` does."""
    return parse_json(read_limited_text(path, most_bytes), is_strict)


def parse_json(text: str | bytes, is_strict: bool = False) -> Any:
    """Parse JSON; ValueError if invalid or nested too deeply. is_strict: refuse NaN and infinities."""

    def finite(text: str) -> float:
        number = float(text)
        if not isfinite(number):
            raise ValueError(f"got {text[:20]}, which is no number of JSON's")
        return number

    try:
        return json.loads(text, parse_constant=finite, parse_float=finite) if is_strict else json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_rows(path: pathlib.Path, most_bytes: int = LARGEST_TABLE_BYTES) -> list[dict[str, str]]:
    """CSV rows by column, unpacked if .gz. Raises OSError, and ValueError for invalid CSV or rows of another length."""
    import csv

    raw = read_limited(path, most_bytes)
    if path.suffix == ".gz":
        import zlib

        unpacking = zlib.decompressobj(_GZIP)
        try:
            raw = unpacking.decompress(raw, most_bytes)
        except zlib.error as error:
            raise ValueError(f"not a gzip file ({error})") from None
        if unpacking.unconsumed_tail:
            raise _too_large(path, most_bytes)
    reader = csv.DictReader(raw.decode("utf-8-sig").splitlines())
    rows: list[dict[str, str]] = []
    try:
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                raise ValueError(f"line {reader.line_num} has not the {count} cells of the first")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(str(error)) from None
    return rows


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Lines of an open file. Raises ValueError for endless ones."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith("\n"):
            raise ValueError(f"got a line of more than {_LONGEST_LINE:,} characters")
        yield line


def _too_large(path: pathlib.Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {most_bytes / 1e6:g} MB, the most that is read of such a file", str(path))
