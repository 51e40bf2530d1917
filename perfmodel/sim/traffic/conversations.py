"""Conversations: requests as turns, each of which has everything before it in its prompt.

A conversation is a stream of tokens that only grows: a system prompt, which a group shares, then what each turn adds
and what was answered. So a KV block has one content for as long as the conversation lasts, its number in the stream,
and a prompt's blocks are the first so many of it. A conversation ends where the next prompt leaves no room for an
answer, as a client's does that is refused.

Readers of recorded conversations. A bad line is reported with its number; nothing is skipped silently.

conversations: JSON lines {"arrival_s", "system_tokens", "turns": [{"input_tokens", "output_tokens", "pause_s"}]}, of
               which only the tokens must be there
sharegpt:      a JSON array, or JSON lines, of {"conversations": [{"from": "human" | "gpt" | "system", "value": text}]};
               each answer closes a turn, what is said without one is left out
aiperf:        JSON lines {"session_id", "turns": [{"text", "output_length", "delay" (ms), "role"}]}, the multi_turn
               format of AIPerf 0.13 (its guide to custom datasets); a leading system turn begins the prompt
guidellm:      JSON lines whose columns have the turn's number: {"system_prompt", "prompt_0", "output_tokens_count_0",
               "prompt_1", ...} (GuideLLM 0.8.1, its generative column mapper; prompt_tokens_count_0 for a text)

Texts are counted as one token for each four characters, begun ones whole: OpenAI's rule of thumb for English. Formats
without the length of an answer, or its pause, take those of the traffic.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.errors import WorkloadError
from perfmodel.files.reach import LARGEST_TABLE_BYTES, bounded_lines, parse_json, read_bounded_text, refuse_path
from perfmodel.sim.traffic.distributions import arrival_times, draw_lengths
from perfmodel.specs.traffic import Arrivals, Lengths, Pause, Stage, Traffic

_CHARACTERS_PER_TOKEN = 4
_MOST_TOKENS = 1_000_000_000
_LONGEST_PAUSE_S = 1e9
_ANSWERS, _SYSTEMS = ("gpt", "assistant", "chatgpt", "bard", "bing"), ("system",)
_GUIDELLM = {
    column: re.compile(rf"(?:{names})(?:es|s)?(?:[-_](?P<turn>\d{{1,6}}))?", re.IGNORECASE)
    for column, names in {
        "text": "prompt|instruction|question|input|context|content|conversation|turn|text",
        "prompt": "prompt_tokens_count|input_tokens_count",
        "answer": "output_tokens_count|completion_tokens_count",
        "system": "system_prompt|system|prefix",
    }.items()
}
_USERS = ("human", "user", "tool", "function", "observation")


class RecordedTurn(NamedTuple):
    """None: not in the file."""

    num_new_tokens: int
    num_output_tokens: int | None
    pause_s: float | None


class RecordedConversation(NamedTuple):
    """arrival_s: counted as the file does; None where it has no times"""

    turns: tuple[RecordedTurn, ...]
    arrival_s: float | None = None
    num_system_tokens: int = 0


class _BadConversationError(Exception):
    """What is wrong with a conversation; the reader adds where."""


def read_conversations(path: str | Path, format_: str) -> Iterator[RecordedConversation]:
    """Conversations in the order of the file; those without a whole turn are left out.

    Raises WorkloadError with file and line (in a JSON array: the number of the conversation) for what cannot be read.
    """
    path, number, count, last = Path(path), 0, 0, 0.0
    try:
        for number, read in _values(path, format_):  # noqa: B007  (the handlers below name it)
            value = read()
            if not isinstance(value, dict):
                raise _BadConversationError(f"found {str(value)[:40]!r}, expected a JSON object")
            found = _READERS[format_](value)
            if found.arrival_s is not None and found.arrival_s < last:
                raise _BadConversationError("its arrival is before the previous one's; sort the file by time")
            last = last if found.arrival_s is None else found.arrival_s
            if found.turns:
                count += 1
                yield found
    except _BadConversationError as error:
        raise WorkloadError(f"{path}:{number}: {error}") from None
    except OSError as error:
        raise WorkloadError(f"{path}: the trace cannot be read: {error.strerror or error}") from None
    except KeyError as error:
        raise WorkloadError(f"{path}:{number}: the conversation has no field {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise WorkloadError(f"{path}:{number}: the conversation cannot be read ({error})") from None
    if not count:
        raise WorkloadError(f"{path}: has no conversation with a turn and its answer; it needs at least one")


def _values(path: Path, format_: str) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Numbers of lines, or in an array, and what reads the object there."""
    refuse_path(path)
    with path.open(encoding="utf-8") as file:
        first = file.readline(2).strip()
    if format_ == "sharegpt" and first.startswith("["):
        listed = parse_json(read_bounded_text(path, LARGEST_TABLE_BYTES))
        for number, value in enumerate(listed, 1):
            yield number, partial(_same, value)
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(bounded_lines(file), 1):
            if line.strip():
                yield number, partial(parse_json, line)


def _same(value: Any) -> Any:
    return value


def _conversations(value: dict[str, Any]) -> RecordedConversation:
    turns = [
        RecordedTurn(_tokens(turn["input_tokens"]), _tokens(turn["output_tokens"]), _pause(turn.get("pause_s")))
        for turn in value["turns"]
    ]
    arrival = value.get("arrival_s")
    system = value.get("system_tokens", 0)
    return RecordedConversation(
        tuple(turns), None if arrival is None else _pause(arrival), 0 if system == 0 else _tokens(system)
    )


def _sharegpt(value: dict[str, Any]) -> RecordedConversation:
    turns: list[RecordedTurn] = []
    said = system = 0
    for message in value["conversations"]:
        who, count = message["from"], _counted(message["value"])
        if who in _SYSTEMS and not turns and not said:
            system += count
        elif who in _ANSWERS:
            if said and count:
                turns.append(RecordedTurn(said, count, None))
                said = 0
        elif who in (*_USERS, *_SYSTEMS):
            said += count
        else:
            raise _BadConversationError(f"found a message from {who!r}, expected human, gpt or system")
    return RecordedConversation(tuple(turns), None, system)


def _aiperf(value: dict[str, Any]) -> RecordedConversation:
    turns: list[RecordedTurn] = []
    system = 0
    for turn in value["turns"]:
        texts = turn.get("texts") or [turn["text"]]
        count = sum(_counted(text) for text in chain.from_iterable(_contents(text) for text in texts))
        if turn.get("role") == "system" and not turns:
            system += count
            continue
        length, delay = turn.get("output_length"), turn.get("delay")
        pause = None if delay is None else _pause(delay / 1e3)
        turns.append(RecordedTurn(max(count, 1), None if length is None else _tokens(length), pause))
    return RecordedConversation(tuple(turns), None, system)


def _guidellm(value: dict[str, Any]) -> RecordedConversation:
    columns: dict[tuple[str, int], Any] = {}
    for key, found in value.items():
        for column, pattern in _GUIDELLM.items():
            if match := pattern.fullmatch(key):
                columns.setdefault((column, int(match["turn"] or 0)), found)
    numbers = sorted({turn for column, turn in columns if column in ("text", "prompt")})
    turns = []
    for number in numbers:
        count, length = columns.get(("prompt", number)), columns.get(("answer", number))
        tokens = max(_counted(columns["text", number]), 1) if count is None else _tokens(count)
        turns.append(RecordedTurn(tokens, None if length is None else _tokens(length), None))
    return RecordedConversation(tuple(turns), None, _counted(columns.get(("system", 0), "")))


def _contents(text: Any) -> list[Any]:
    """A text, or those of an object {"contents": [...]}."""
    return list(text["contents"]) if isinstance(text, dict) else [text]


def _counted(text: Any) -> int:
    if not isinstance(text, str):
        raise _BadConversationError(f"found {str(text)[:40]!r}, expected a text")
    return -(-len(text) // _CHARACTERS_PER_TOKEN)


def _tokens(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
        raise _BadConversationError(f"found {value!r} tokens, expected a whole number from 1 to {_MOST_TOKENS:,}")
    return value


def _pause(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_PAUSE_S:
        raise _BadConversationError(f"found {value!r} s, expected a number from 0 to {_LONGEST_PAUSE_S:,.0f}")
    return float(value)


_READERS: dict[str, Callable[[dict[str, Any]], RecordedConversation]] = {
    "aiperf": _aiperf,
    "conversations": _conversations,
    "guidellm": _guidellm,
    "sharegpt": _sharegpt,
}


_CONTENT = 1 << 32  # numbers of one conversation's blocks
_SYSTEM = 1 << 61  # offset of the numbers of groups' system prompts
_NO_PAUSE = Pause(mean_s=0.0, distribution="fixed")
_LOOKED_AT = 4096  # draws of how many turns there are, for their mean


class Turn(NamedTuple):
    """What a turn adds to the prompt, what is answered, and the pause since the last answer in seconds."""

    num_new_tokens: int
    num_output_tokens: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """arrival_s: of its first turn; None in a closed loop, where the system's answers set the time

    num_system_tokens, group: of the prompt that it begins with, which all of a group have in common
    """

    arrival_s: float | None
    turns: tuple[Turn, ...]
    num_system_tokens: int = 0
    group: int = 0


class TurnPrompt(NamedTuple):
    """A turn as a request: block_contents are those of the prompt and of the answer, as far as blocks are full."""

    num_prompt_tokens: int
    num_output_tokens: int
    block_contents: tuple[int, ...]
    pause_s: float


def turns_of(conversation: Conversation, number: int, block_size: int, max_model_len: int) -> Iterator[TurnPrompt]:
    """The turns of conversation `number`, as far as they fit.

    block_size: tokens of a KV block; max_model_len: tokens of the longest prompt with its answer
    """
    length, shared = conversation.num_system_tokens, conversation.num_system_tokens // block_size
    system = _SYSTEM + conversation.group * _CONTENT
    for turn in conversation.turns:
        prompt = length + turn.num_new_tokens
        if prompt >= max_model_len:
            return
        outputs = min(turn.num_output_tokens, max_model_len - prompt)
        length = prompt + outputs
        own = range(number * _CONTENT + shared, number * _CONTENT + length // block_size)
        yield TurnPrompt(prompt, outputs, (*range(system, system + shared), *own), turn.pause_s)


def drawn_conversations(traffic: Traffic, streams: list[np.random.Generator], longest: int) -> Iterator[Conversation]:
    """Conversations as the traffic describes them, endlessly or until its `duration_s`.

    streams: draw arrivals, what is new, answers, turns and groups, pauses; longest: tokens that a length is clipped to
    """
    spec = traffic.conversations
    assert spec is not None
    assert spec.turns is not None
    assert traffic.input_tokens is not None
    assert traffic.output_tokens is not None
    for_arrivals, for_inputs, for_outputs, for_turns, for_pauses = streams
    arrivals = _slowed(traffic.arrivals, _mean_turns(spec.turns))
    inputs = draw_lengths(traffic.input_tokens, for_inputs, longest)
    outputs = draw_lengths(traffic.output_tokens, for_outputs, longest)
    results = draw_lengths(spec.tool_tokens or traffic.input_tokens, for_inputs.spawn(1)[0], longest)
    counts = draw_lengths(spec.turns, for_turns, longest)
    for arrival, count in zip(arrival_times(arrivals, traffic.duration_s, for_arrivals), counts, strict=False):
        turns = [Turn(next(inputs), next(outputs), 0.0)]
        for _ in range(count - 1):
            is_tool = bool(for_pauses.random() < spec.tool_share)
            pause = spec.tool_time if is_tool and spec.tool_time is not None else spec.think_time
            turns.append(Turn(next(results if is_tool else inputs), next(outputs), _drawn_pause(pause, for_pauses)))
        group = int(for_turns.integers(spec.num_groups))
        yield Conversation(arrival, tuple(turns), spec.system_tokens, group)


def recorded_conversations(
    traffic: Traffic, streams: list[np.random.Generator], longest: int
) -> Iterator[Conversation]:
    """Those of the traffic's trace, at its times or those of the arrivals given; what it does not say is drawn.

    streams, longest: as of `drawn_conversations`

    Raises WorkloadError for a file that cannot be read, or that does not say what nobody else does.
    """
    trace, for_answers, for_pauses = traffic.trace, streams[2], streams[4]
    assert trace is not None
    recorded = list(read_conversations(trace.path, trace.format))
    follows_trace = traffic.arrivals.process == "trace"
    if follows_trace and recorded[0].arrival_s is None:
        raise WorkloadError(f"{trace.path}: has no arrival_s; give traffic.arrivals, such as a rate.")
    if traffic.output_tokens is None and any(
        turn.num_output_tokens is None for each in recorded for turn in each.turns
    ):
        raise WorkloadError(f"{trace.path}: has turns without output_length; give traffic.output_tokens.")
    answers = draw_lengths(traffic.output_tokens, for_answers, longest) if traffic.output_tokens else iter(())
    pause = traffic.conversations.think_time if traffic.conversations is not None else _NO_PAUSE
    mean = sum(len(each.turns) for each in recorded) / len(recorded)
    times = arrival_times(_slowed(traffic.arrivals, mean), traffic.duration_s, streams[0])
    first = recorded[0].arrival_s or 0.0
    for each, time in zip(recorded, times, strict=False):
        arrival = ((each.arrival_s or 0.0) - first) / trace.speedup if follows_trace else time
        if traffic.duration_s is not None and arrival is not None and arrival > traffic.duration_s:
            return
        turns = [
            Turn(
                turn.num_new_tokens,
                turn.num_output_tokens or next(answers),
                (_drawn_pause(pause, for_pauses) if turn.pause_s is None else turn.pause_s) / trace.speedup,
            )
            for turn in each.turns
        ]
        yield Conversation(arrival, tuple(turns), each.num_system_tokens)


def _mean_turns(turns: Lengths) -> float:
    """Turns of a conversation on average, as drawn."""
    drawn = islice(draw_lengths(turns, np.random.default_rng(0), _CONTENT), _LOOKED_AT)
    return float(turns.value or np.mean(list(drawn)))


def _drawn_pause(pause: Pause, rng: np.random.Generator) -> float:
    """Seconds."""
    return pause.mean_s if pause.distribution == "fixed" else float(rng.exponential(pause.mean_s))


def _slowed(arrivals: Arrivals, times: float) -> Arrivals:
    """Arrivals at rates so many times lower: of conversations, where those of requests are given."""
    stages = tuple(Stage(rate=stage.rate / times, duration_s=stage.duration_s) for stage in arrivals.stages)
    rate = None if arrivals.rate is None else arrivals.rate / times
    return arrivals.model_copy(update={"rate": rate, "stages": stages})
