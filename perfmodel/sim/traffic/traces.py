"""Readers of request traces. A bad line is reported with its number; nothing is skipped silently.

azure:    CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces 2023)
mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens
csv:      CSV with `arrival_s`, `input_tokens`, `output_tokens` (or `arrival`, `input`, `output`) and optionally
          `session_id`: what a gateway's log is soon made into
burstgpt: CSV with `Timestamp` (s), `Request tokens`, `Response tokens`; a response of 0 tokens is a recorded failure
jsonl:    JSON lines with `arrival_s`, `input_tokens`, `output_tokens` and optionally `block_hashes`, `hash_block_size`,
          `session_id`
"""

import csv
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from perfmodel.errors import WorkloadError
from perfmodel.files.reach import bounded_lines, parse_json, refuse_path

_LATEST_S = 1e11  # seconds of an epoch, and then some: the year 5138
_MOST_TOKENS = 1_000_000_000  # of a prompt, or an answer: far beyond any context


class TraceRow(NamedTuple):
    """One recorded request; `arrival_s` counts from the first."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    hash_block_size: int = 16
    session: str | int | None = None


class _BadLineError(Exception):
    """What is wrong with a line; the reader adds where."""


def read_trace(path: str | Path, format_: str) -> Iterator[TraceRow]:
    """Rows of the trace in order of arrival. Raises WorkloadError with file and line for what cannot be read."""
    path = Path(path)
    refuse_path(path)
    try:
        file = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise WorkloadError(f"{path}: the trace cannot be read: {error.strerror}") from None
    with file:
        yield from _checked(path, _READERS[format_](file))


def _checked(path: Path, lines: Iterator[tuple[int, Any]]) -> Iterator[TraceRow]:
    first, last, number = None, 0.0, 0
    try:
        for number, parse in lines:  # noqa: B007  (the handlers below name it)
            row: TraceRow | None = parse()
            if row is None:
                continue
            if row.num_prompt_tokens < 1 or row.num_output_tokens < 1:
                raise _BadLineError(
                    f"found {row.num_prompt_tokens} input and {row.num_output_tokens} output tokens, "
                    f"expected at least one of each"
                )
            if max(row.num_prompt_tokens, row.num_output_tokens) > _MOST_TOKENS:
                raise _BadLineError(f"found more than {_MOST_TOKENS:,} tokens of one request, expected at most that")
            if not abs(row.arrival_s) <= _LATEST_S:  # which what is no number is not, either
                raise _BadLineError(f"found an arrival at {row.arrival_s:g} s, expected at most {_LATEST_S:g}")
            first = row.arrival_s if first is None else first
            if row.arrival_s - first < last:
                raise _BadLineError("its arrival is before the previous one's; sort the trace by time")
            last = row.arrival_s - first
            yield TraceRow(
                last, row.num_prompt_tokens, row.num_output_tokens, row.block_hashes, row.hash_block_size, row.session
            )
    except _BadLineError as error:
        raise WorkloadError(f"{path}:{number}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"has no field {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
        raise WorkloadError(f"{path}:{number}: the line {what}") from None
    except csv.Error as error:
        raise WorkloadError(f"{path}: is not a CSV file ({error})") from None
    if first is None:
        raise WorkloadError(f"{path}: the trace is empty; it needs at least one request")


Lines = Iterator[tuple[int, Callable[[], TraceRow | None]]]


def _csv_lines(file: TextIO, *columns: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(number, row) of the lines; a column may have a second name, `arrival_s|arrival`, and is given by its first."""
    reader = csv.DictReader(bounded_lines(file))
    header = reader.fieldnames or ()
    names = {
        first: next((n for n in (first, *more) if n in header), "") for first, *more in (c.split("|") for c in columns)
    }
    missing = [first for first, name in names.items() if not name]
    if header and missing:
        raise WorkloadError(f"{file.name}:1: found columns {', '.join(header)}; {missing[0]!r} is missing")
    for row in reader:
        yield reader.line_num, row | {first: row[name] for first, name in names.items()}


def _azure(file: TextIO) -> Lines:
    def parse(row: dict[str, str]) -> TraceRow:
        stamp = row["TIMESTAMP"]
        whole, _, fraction = stamp.partition(".")  # seven digits of fraction, one more than datetime takes
        seconds = datetime.fromisoformat(whole + "+00:00").timestamp()
        seconds += float("0." + (fraction or "0"))
        return TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))

    for number, row in _csv_lines(file, "TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        yield number, lambda row=row: parse(row)  # type: ignore[misc]


def _plain_csv(file: TextIO) -> Lines:
    def parse(row: dict[str, str]) -> TraceRow:
        lengths = int(row["input_tokens"]), int(row["output_tokens"])
        return TraceRow(float(row["arrival_s"]), *lengths, session=row.get("session_id") or None)

    for number, row in _csv_lines(file, "arrival_s|arrival", "input_tokens|input", "output_tokens|output"):
        yield number, lambda row=row: parse(row)  # type: ignore[misc]


def _burstgpt(file: TextIO) -> Lines:
    def parse(row: dict[str, str]) -> TraceRow | None:
        outputs = int(row["Response tokens"])
        return TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), outputs) if outputs else None

    for number, row in _csv_lines(file, "Timestamp", "Request tokens", "Response tokens"):
        yield number, lambda row=row: parse(row)  # type: ignore[misc]


def _json_lines(file: TextIO) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
    for number, line in enumerate(bounded_lines(file), 1):
        if line.strip():
            yield number, lambda line=line: _object(line)  # type: ignore[misc]


def _object(line: str) -> dict[str, Any]:
    value = parse_json(line)
    if not isinstance(value, dict):
        raise _BadLineError(f"found {line.strip()[:40]!r}, expected a JSON object")
    return value


def _mooncake(file: TextIO) -> Lines:
    def parse(row: dict[str, Any]) -> TraceRow:
        hashes = tuple(int(h) for h in row.get("hash_ids", ()))
        return TraceRow(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), hashes, 512)

    for number, load in _json_lines(file):
        yield number, lambda load=load: parse(load())  # type: ignore[misc]


def _jsonl(file: TextIO) -> Lines:
    def parse(row: dict[str, Any]) -> TraceRow:
        hashes = tuple(int(h) for h in row.get("block_hashes", ()))
        size = int(row.get("hash_block_size", 16))
        lengths = int(row["input_tokens"]), int(row["output_tokens"])
        session = row.get("session_id")
        if not (session is None or isinstance(session, str | int)):
            raise _BadLineError(f"found session_id {session!r}, expected a string or a whole number")
        return TraceRow(float(row["arrival_s"]), *lengths, hashes, size, session)

    for number, load in _json_lines(file):
        yield number, lambda load=load: parse(load())  # type: ignore[misc]


_READERS: dict[str, Callable[[TextIO], Lines]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "csv": _plain_csv,
    "jsonl": _jsonl,
    "mooncake": _mooncake,
}
