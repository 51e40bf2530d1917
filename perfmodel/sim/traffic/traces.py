"""Readers of recorded traffic. A bad line is an error with its number; nothing is skipped silently.

Requests:

azure:    CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces 2023)
mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens
csv:      CSV with `arrival_s`, `input_tokens`, `output_tokens` (or `arrival`, `input`, `output`), optional `session_id`
burstgpt: CSV with `Timestamp` (s), `Request tokens`, `Response tokens`; a response of 0 tokens is a recorded failure
jsonl:    JSON lines with `arrival_s`, `input_tokens`, `output_tokens`, optional `block_hashes`, `hash_block_size`,
          `session_id`

Conversations:

conversations: JSON lines {"arrival_s", "system_tokens", "turns": [{"input_tokens", "output_tokens", "pause_s"}]}; only
               the token counts are required
sharegpt:      a JSON array, or JSON lines, of {"conversations": [{"from": "human" | "gpt" | "system", "value": text}]};
               each answer closes a turn, text without an answer is left out
aiperf:        JSON lines {"session_id", "turns": [{"text", "output_length", "delay" (ms), "role"}]}, the multi_turn
               format of AIPerf 0.13 (its guide to custom datasets); a leading system turn begins the prompt
agents:        JSON lines {"block_size", "hash_id_scope", "requests": [{"t", "in", "out", "hash_ids", "think_time",
               "api_time"}]}, a coding agent's session each (kv-cache-tester's traces; times in seconds)
guidellm:      JSON lines with numbered columns: {"system_prompt", "prompt_0", "output_tokens_count_0", "prompt_1", ...}
               (GuideLLM 0.8.1, its generative column mapper; prompt_tokens_count_0 for a text)

Texts count ceil(characters / 4) tokens (OpenAI's rule of thumb for English). Missing answer lengths and pauses are
the traffic's. A file whose name ends with `.gz` is unpacked as it is read."""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from perfmodel.errors import WorkloadError
from perfmodel.files.sandbox import LARGEST_TABLE_BYTES, bounded_lines, parse_json, read_limited_text, refuse_path

_LATEST_S = 1e11  # seconds of an epoch, and then some: the year 5138
_LONGEST_PAUSE_S = 1e9
_MAX_TOKENS = 1_000_000_000  # per prompt or answer: far beyond any context
_CHARACTERS_PER_TOKEN = 4


class TraceRow(NamedTuple):
    """One recorded request; `arrival_s` counts from the first."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    hash_block_size: int = 16
    session: str | int | None = None


class RecordedTurn(NamedTuple):
    """None: not in the file."""

    num_new_tokens: int
    num_output_tokens: int | None
    pause_s: float | None


class RecordedHashes(NamedTuple):
    """What the prompts of a session share, where the file says so, turn by turn; `num_new_tokens` is then of whole
    prompts.

    blocks:    hashes of the prompt's full blocks of `block_size` tokens
    after:     number of the turn whose answer the pause follows, -1 for the session's beginning
    is_global: equal hashes of all sessions are the same block"""

    block_size: int
    blocks: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]
    is_global: bool = False


class RecordedConversation(NamedTuple):
    """arrival_s: on the file's own clock; None if it has no times. hashes: None where prompts grow by what was said"""

    turns: tuple[RecordedTurn, ...]
    arrival_s: float | None = None
    num_system_tokens: int = 0
    hashes: RecordedHashes | None = None


class _BadRecordError(Exception):
    """What is wrong with a record; `_explaining` adds where."""


class _Place:
    number = 0  # of the line or the conversation that is being read


@contextmanager
def _explaining(path: Path, kind: str) -> Iterator[_Place]:
    """Turn read errors into sentences with their place, a line or a conversation (`kind`)."""
    place = _Place()
    try:
        yield place
    except _BadRecordError as error:
        raise WorkloadError(f"{path}:{place.number}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: the trace cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except csv.Error as error:
        raise WorkloadError(f"{path}: is not a CSV file ({error})") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"has no field {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
        raise WorkloadError(f"{path}:{place.number}: the {kind} {what}") from None


def _opened(path: Path, newline: str | None = None) -> TextIO:
    """Reads text, unpacked where the name ends with .gz."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline=newline)
    return path.open(encoding="utf-8", newline=newline)


def read_trace(path: str | Path, format_: str) -> Iterator[TraceRow]:
    """Rows of the trace in order of arrival. Raises WorkloadError with file and line for what cannot be read."""
    path, first, last = Path(path), None, 0.0
    columns, parse = _TRACES[format_]
    refuse_path(path)
    with _explaining(path, "line") as place, _opened(path, newline="") as file:
        for record in _csv_rows(file, columns, place) if columns else _json_objects(file, place):
            row = parse(record)
            if row is None:
                continue
            if row.num_prompt_tokens < 1 or row.num_output_tokens < 1:
                raise _BadRecordError(
                    f"got {row.num_prompt_tokens} input and {row.num_output_tokens} output tokens, "
                    f"expected at least one of each"
                )
            if max(row.num_prompt_tokens, row.num_output_tokens) > _MAX_TOKENS:
                raise _BadRecordError(f"got more than {_MAX_TOKENS:,} tokens of one request, expected at most that")
            if not abs(row.arrival_s) <= _LATEST_S:  # also rejects nan
                raise _BadRecordError(f"got an arrival at {row.arrival_s:g} s, expected at most {_LATEST_S:g}")
            first = row.arrival_s if first is None else first
            if row.arrival_s - first < last:
                raise _BadRecordError("its arrival is before the previous one's; sort the trace by time")
            last = row.arrival_s - first
            yield row._replace(arrival_s=last)
    if first is None:
        raise WorkloadError(f"{path}: the trace is empty; it needs at least one request")


def read_conversations(path: str | Path, format_: str) -> Iterator[RecordedConversation]:
    """Conversations in file order; those without a whole turn are left out.

    Raises WorkloadError with file and line (in a JSON array: the number of the conversation) for what cannot be read.
    """
    path, count, last = Path(path), 0, 0.0
    refuse_path(path)
    with _explaining(path, "conversation") as place, _opened(path) as file:
        is_array = format_ == "sharegpt" and file.readline(2).strip().startswith("[")
        file.seek(0)
        for record in _array_objects(path, place) if is_array else _json_objects(file, place):
            conversation = _CONVERSATIONS[format_](record)
            if conversation.arrival_s is not None and conversation.arrival_s < last:
                raise _BadRecordError("its arrival is before the previous one's; sort the file by time")
            last = last if conversation.arrival_s is None else conversation.arrival_s
            if conversation.turns:
                count += 1
                yield conversation
    if not count:
        raise WorkloadError(f"{path}: has no conversation with a turn and its answer; it needs at least one")


def engine_blocks(num_tokens: int, hashes: Sequence[int], of_trace: int, size: int) -> tuple[int, ...]:
    """Contents of the full blocks, of `size` tokens, of a prompt of `num_tokens`, from `hashes` of its blocks of
    `of_trace` tokens: a block of 512 is 32 of 16; a block that spans several is equal if all of these are."""
    num_blocks = min(num_tokens, len(hashes) * of_trace) // size
    per_block, rest = divmod(of_trace, size)
    if not rest:
        whole = hashes[: -(-num_blocks // per_block)]
        return tuple([block * per_block + part for block in whole for part in range(per_block)][:num_blocks])
    ends = ((i * size, (i + 1) * size) for i in range(num_blocks))
    return tuple(hash((begin % of_trace, *hashes[begin // of_trace : -(-end // of_trace)])) for begin, end in ends)


def _json_objects(file: TextIO, place: _Place) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(bounded_lines(file), 1):
        if line.strip():
            place.number = number
            yield _checked_object(parse_json(line))


def _array_objects(path: Path, place: _Place) -> Iterator[dict[str, Any]]:
    for place.number, value in enumerate(parse_json(read_limited_text(path, LARGEST_TABLE_BYTES)), 1):
        yield _checked_object(value)


def _checked_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _BadRecordError(f"got {str(value)[:40]!r}; expected a JSON object")
    return value


def _csv_rows(file: TextIO, columns: tuple[str, ...], place: _Place) -> Iterator[dict[str, str]]:
    """Rows; `arrival_s|arrival` allows a second column name and yields the first."""
    reader = csv.DictReader(bounded_lines(file))
    header = reader.fieldnames or ()
    choices = [column.split("|") for column in columns]
    names = {names[0]: next((name for name in names if name in header), "") for names in choices}
    missing = [first for first, name in names.items() if not name]
    if header and missing:
        raise WorkloadError(f"{file.name}:1: got columns {', '.join(header)}; {missing[0]!r} is missing")
    for row in reader:
        place.number = reader.line_num
        yield row | {first: row[name] for first, name in names.items()}


# ---------------------------------------------------------------- requests


def _azure(row: dict[str, str]) -> TraceRow:
    whole, _, fraction = row["TIMESTAMP"].partition(".")  # seven digits of fraction, one more than datetime takes
    seconds = datetime.fromisoformat(whole + "+00:00").timestamp() + float("0." + (fraction or "0"))
    return TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _plain_csv(row: dict[str, str]) -> TraceRow:
    lengths = int(row["input_tokens"]), int(row["output_tokens"])
    return TraceRow(float(row["arrival_s"]), *lengths, session=row.get("session_id") or None)


def _burstgpt(row: dict[str, str]) -> TraceRow | None:
    outputs = int(row["Response tokens"])
    return TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), outputs) if outputs else None


def _mooncake(row: dict[str, Any]) -> TraceRow:
    hashes = tuple(int(h) for h in row.get("hash_ids", ()))
    return TraceRow(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), hashes, 512)


def _jsonl(row: dict[str, Any]) -> TraceRow:
    hashes = tuple(int(h) for h in row.get("block_hashes", ()))
    size, session = int(row.get("hash_block_size", 16)), row.get("session_id")
    lengths = int(row["input_tokens"]), int(row["output_tokens"])
    if not (session is None or isinstance(session, str | int)):
        raise _BadRecordError(f"got session_id {session!r}; expected a string or a whole number")
    return TraceRow(float(row["arrival_s"]), *lengths, hashes, size, session)


# By format: CSV columns (none: JSON lines) and row parser.
_TRACES: dict[str, tuple[tuple[str, ...], Callable[[Any], TraceRow | None]]] = {
    "azure": (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    "burstgpt": (("Timestamp", "Request tokens", "Response tokens"), _burstgpt),
    "csv": (("arrival_s|arrival", "input_tokens|input", "output_tokens|output"), _plain_csv),
    "jsonl": ((), _jsonl),
    "mooncake": ((), _mooncake),
}

# ---------------------------------------------------------------- conversations


def _plain(value: dict[str, Any]) -> RecordedConversation:
    turns = [
        RecordedTurn(_tokens(turn["input_tokens"]), _tokens(turn["output_tokens"]), _pause(turn.get("pause_s")))
        for turn in value["turns"]
    ]
    system = value.get("system_tokens", 0)
    return RecordedConversation(tuple(turns), _pause(value.get("arrival_s")), 0 if system == 0 else _tokens(system))


_ANSWERS, _SYSTEM = ("gpt", "assistant", "chatgpt", "bard", "bing"), "system"
_PROMPTS = ("human", "user", "tool", "function", "observation", _SYSTEM)


def _sharegpt(value: dict[str, Any]) -> RecordedConversation:
    turns: list[RecordedTurn] = []
    asked = system = 0
    for message in value["conversations"]:
        who, count = message["from"], _counted(message["value"])
        if who == _SYSTEM and not turns and not asked:
            system += count
        elif who in _ANSWERS:
            if asked and count:
                turns.append(RecordedTurn(asked, count, None))
                asked = 0
        elif who in _PROMPTS:
            asked += count
        else:
            raise _BadRecordError(f"got a message from {who!r}; expected human, gpt or system")
    return RecordedConversation(tuple(turns), None, system)


def _aiperf(value: dict[str, Any]) -> RecordedConversation:
    turns: list[RecordedTurn] = []
    system = 0
    for turn in value["turns"]:
        texts = turn.get("texts") or [turn["text"]]
        # A string, or the texts of an object {"contents": [...]}.
        contents = [text["contents"] if isinstance(text, dict) else [text] for text in texts]
        count = sum(_counted(text) for parts in contents for text in parts)
        if turn.get("role") == "system" and not turns:
            system += count
            continue
        length, delay = turn.get("output_length"), turn.get("delay")
        pause = None if delay is None else _pause(delay / 1e3)
        turns.append(RecordedTurn(max(count, 1), None if length is None else _tokens(length), pause))
    return RecordedConversation(tuple(turns), None, system)


_GUIDELLM = {
    column: re.compile(rf"(?:{names})(?:es|s)?(?:[-_](?P<turn>\d{{1,6}}))?", re.IGNORECASE)
    for column, names in {
        "text": "prompt|instruction|question|input|context|content|conversation|turn|text",
        "prompt": "prompt_tokens_count|input_tokens_count",
        "answer": "output_tokens_count|completion_tokens_count",
        "system": "system_prompt|system|prefix",
    }.items()
}


def _guidellm(value: dict[str, Any]) -> RecordedConversation:
    columns: dict[tuple[str, int], Any] = {}
    for key, field in value.items():
        for column, pattern in _GUIDELLM.items():
            if match := pattern.fullmatch(key):
                columns.setdefault((column, int(match["turn"] or 0)), field)
    turns = []
    for number in sorted({turn for column, turn in columns if column in ("text", "prompt")}):
        count, length = columns.get(("prompt", number)), columns.get(("answer", number))
        tokens = max(_counted(columns["text", number]), 1) if count is None else _tokens(count)
        turns.append(RecordedTurn(tokens, None if length is None else _tokens(length), None))
    return RecordedConversation(tuple(turns), None, _counted(columns.get(("system", 0), "")))


_WHOLE_S = 1.0  # starts are recorded in whole seconds: a shorter overlap is none
_MAX_HASH = 1 << 32


def _agents(value: dict[str, Any]) -> RecordedConversation:
    """A request waits for the last answer that had ended when it began; requests that overlapped run side by side.

    Its pause is the recorded think_time after the request before it, but no more than lies between the two starts:
    where the answer's time (`api_time`) is missing, think_time counts from an earlier answer."""
    turns: list[RecordedTurn] = []
    blocks: list[tuple[int, ...]] = []
    waits: list[int] = []
    spans: list[tuple[float, float]] = []  # start and end of each request
    for number, request in enumerate(value["requests"]):
        start = _pause(request["t"]) or 0.0
        if spans and start < spans[-1][0]:
            raise _BadRecordError(f"its request {number} begins before the one before it; sort them by t")
        over = [place for place, (_, end) in enumerate(spans) if end <= start + _WHOLE_S]
        after = max(over, key=lambda place: (spans[place][1], place), default=-1)
        began, ended = spans[after] if over else (spans[0] if spans else (start, start))
        think = _pause(request.get("think_time"))
        gap = max(start - (ended if over else began), 0.0)
        is_next = after == number - 1 and think is not None
        hashes = tuple(request["hash_ids"])
        if any(type(block) is not int or not 0 <= block < _MAX_HASH for block in hashes):
            raise _BadRecordError(f"its request {number} has hash_ids other than whole numbers from 0 to 2^32 - 1")
        pause = min(think or 0.0, start - began) if is_next else gap
        turns.append(RecordedTurn(_tokens(request["in"]), _tokens(request["out"]), pause))
        blocks.append(hashes)
        waits.append(after)
        spans.append((start, start + (_pause(request.get("api_time")) or 0.0)))
    size, is_global = _tokens(value.get("block_size", 64)), value.get("hash_id_scope", "local") == "global"
    return RecordedConversation(tuple(turns), None, 0, RecordedHashes(size, tuple(blocks), tuple(waits), is_global))


def _counted(text: Any) -> int:
    if not isinstance(text, str):
        raise _BadRecordError(f"got {str(text)[:40]!r}; expected a text")
    return -(-len(text) // _CHARACTERS_PER_TOKEN)


def _tokens(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_TOKENS:
        raise _BadRecordError(f"got {value!r} tokens, expected a whole number from 1 to {_MAX_TOKENS:,}")
    return value


def _pause(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_PAUSE_S:
        raise _BadRecordError(f"got {value!r} s, expected a number from 0 to {_LONGEST_PAUSE_S:,.0f}")
    return float(value)


_CONVERSATIONS: dict[str, Callable[[dict[str, Any]], RecordedConversation]] = {
    "agents": _agents,
    "aiperf": _aiperf,
    "conversations": _plain,
    "guidellm": _guidellm,
    "sharegpt": _sharegpt,
}
