"""Files read with a limit, so that a wrong one (a device, a bomb) ends in a sentence and not in the machine's memory.

Every reader of a user's file takes its bytes, lines or JSON from here, and none that `reach` refuses. What is larger
than its limit is an `OSError` like a file that cannot be opened, so that whoever says "cannot be read" says why.
"""

import errno
import json
import pathlib
from collections.abc import Iterator
from math import isfinite
from typing import Any, TextIO

from perfmodel.files.reach import refuse_path

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
    """What a JSON file holds. Raises OSError, and ValueError for what is not JSON.

    most_bytes: of the file; is_strict: as of `parse_json`
    """
    return parse_json(read_bounded_text(path, most_bytes), is_strict)


def parse_json(text: str | bytes, is_strict: bool = False) -> Any:
    """What JSON says. Raises ValueError for what is none, and for lists in lists that are too deep to be read.

    is_strict: refuse NaN and infinities, which Python writes and JSON does not know
    """
    try:
        if is_strict:
            return json.loads(text, parse_constant=_no_number, parse_float=_finite)
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(text: str) -> float:
    raise ValueError(f"found {text[:20]}, which is no number of JSON's")


def _finite(text: str) -> float:
    number = float(text)
    return number if isfinite(number) else _no_number(text)


def read_rows(path: pathlib.Path, most_bytes: int = LARGEST_TABLE_BYTES) -> list[dict[str, str]]:
    """The rows of a CSV file by its columns' names, unpacked where its name ends in .gz.

    Raises OSError, and ValueError for what is no CSV or has a line with other cells than the first.
    """
    import csv

    raw = read_bounded(path, most_bytes)
    if path.suffix == ".gz":
        raw = _unpacked(raw, path, most_bytes)
    reader = csv.DictReader(raw.decode("utf-8-sig").splitlines())
    try:
        rows: list[dict[str, str]] = []
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                raise ValueError(f"line {reader.line_num} has not the {count} cells of the first")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(str(error)) from None
    return rows


def _unpacked(raw: bytes, path: pathlib.Path, most_bytes: int) -> bytes:
    import zlib

    unpacking = zlib.decompressobj(_GZIP)
    try:
        found = unpacking.decompress(raw, most_bytes)
    except zlib.error as error:
        raise ValueError(f"not a gzip file ({error})") from None
    if unpacking.unconsumed_tail:
        raise _too_large(path, most_bytes)
    return found


def bounded_lines(file: TextIO) -> Iterator[str]:
    """The lines of an open file. Raises ValueError for one that has no end in sight."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith("\n"):
            raise ValueError(f"found a line of more than {_LONGEST_LINE:,} characters")
        yield line


def _too_large(path: pathlib.Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {most_bytes / 1e6:g} MB, the most that is read of such a file", str(path))
