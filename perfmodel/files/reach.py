"""Which files may be touched: any, or, within `without_files`, only the catalogue's and those below some folders.

A page in a browser says names that anybody may have written into its address. There a name is never a path of this
machine: what would be looked for as one is refused before the disk is asked, so that no answer tells whether a file is
there, and nothing is fetched from the network. Uploaded files lie in a folder of their own, which is allowed.

The limits hold in the context (`contextvars`) that set them, and in the worker processes that it starts.

Files read with a limit, so that a wrong one (a device, a bomb) ends in a sentence and not in the machine's memory.

Every reader of a user's file takes its bytes, lines or JSON from here, and none that `reach` refuses. What is larger
than its limit is an `OSError` like a file that cannot be opened, so that whoever says "cannot be read" says why.
"""

import errno
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
_LONGEST = 80  # characters of a name that is refused


@contextmanager
def without_files(allowed: Sequence[str | Path] = ()) -> Iterator[None]:
    """Within it names are the catalogue's, or those of files below the folders `allowed`; others raise SpecError."""
    token = _ALLOWED.set(tuple(Path(os.path.abspath(folder)) for folder in allowed))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@contextmanager
def touchable(folder: Path) -> Iterator[None]:
    """Within it files below `folder` may be touched as well: a cache that is asked by names alone."""
    allowed = _ALLOWED.get()
    token = _ALLOWED.set(None if allowed is None else (*allowed, Path(os.path.abspath(folder))))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def is_only_names() -> bool:
    """Whether files are refused here, and the network."""
    return _ALLOWED.get() is not None


def may_touch(path: str | Path) -> bool:
    """Whether the disk may be asked for `path`. A link below an allowed folder does not lead out of it."""
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
    """Raises SpecError for what can only be the path of a file, where that may not be touched."""
    text = str(name)
    is_path = isinstance(name, Path) or _PATH_LIKE.match(text) or text.lower().endswith(_SUFFIXES)
    if is_path and not may_touch(name):
        raise refused(text)


def refused(name: str) -> SpecError:
    """What is said of a name that may not be looked for as a path."""
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    return SpecError(f"{shown!r} names a file; here only names of the catalog are allowed: drop the file on the page.")


def within_reach(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function`, to be called in another process with the limits that hold here."""
    allowed = _ALLOWED.get()
    return function if allowed is None else partial(_call_within, function, allowed)


def _call_within(function: Callable[[Any], Any], allowed: tuple[Path, ...], item: Any) -> Any:
    with without_files(allowed):
        return function(item)


# Parsed JSON takes some twenty times its size: half a gigabyte. The largest index of weights has 9 MB (DeepSeek-V3).
LARGEST_JSON_BYTES = 32_000_000
# Recorded measurements, unpacked: the largest published ones have some 20 MB.
LARGEST_TABLE_BYTES = 256_000_000
_LONGEST_LINE = 10_000_000  # characters: a request whose prompt has a million blocks
_GZIP = 31  # zlib's code for a gzip header around the deepest window


def read_bounded(path: pathlib.Path, most_bytes: int) -> bytes:
    """The bytes of a file. Raises OSError as opening does, and for more than `most_bytes` of them; SpecError for a file
    that may not be touched."""
    refuse_path(path)
    with path.open("rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise _too_large(path, most_bytes)
    return found


def read_bounded_text(path: pathlib.Path, most_bytes: int) -> str:
    """The UTF-8 text of a file, lines ending in one character each. Raises OSError and UnicodeDecodeError."""
    text = read_bounded(path, most_bytes).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: pathlib.Path, most_bytes: int = LARGEST_JSON_BYTES, is_strict: bool = False) -> Any:
    """What a JSON file of up to `most_bytes` holds. Raises OSError, and ValueError as `parse_json` does."""
    return parse_json(read_bounded_text(path, most_bytes), is_strict)


def parse_json(text: str | bytes, is_strict: bool = False) -> Any:
    """What JSON says. Raises ValueError for what is none, and for lists in lists that are too deep to be read.

    is_strict: refuse NaN and infinities, which Python writes and JSON does not know
    """

    def finite(text: str) -> float:
        number = float(text)
        if not isfinite(number):
            raise ValueError(f"found {text[:20]}, which is no number of JSON's")
        return number

    try:
        return json.loads(text, parse_constant=finite, parse_float=finite) if is_strict else json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_rows(path: pathlib.Path, most_bytes: int = LARGEST_TABLE_BYTES) -> list[dict[str, str]]:
    """The rows of a CSV file by its columns' names, unpacked where its name ends in .gz. Raises OSError, and ValueError
    for what is no CSV or has a line with other cells than the first."""
    import csv

    raw = read_bounded(path, most_bytes)
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
    """The lines of an open file. Raises ValueError for one that has no end in sight."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith("\n"):
            raise ValueError(f"found a line of more than {_LONGEST_LINE:,} characters")
        yield line


def _too_large(path: pathlib.Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {most_bytes / 1e6:g} MB, the most that is read of such a file", str(path))
