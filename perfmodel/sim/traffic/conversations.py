"""Conversations: each turn's prompt contains everything before it.

A conversation is one growing token stream: a system prompt shared by a group, then inputs and answers. So a KV block's
content is its number in the stream, and prompts are prefixes. A conversation ends where the next prompt leaves no
room for an answer, as a refused client's does.

Recorded sessions of agents say which blocks their prompts share, by hashes, and which answer each request waits for: a
session may fork, change what was said, and have several requests under way. What of an answer is in the next prompt is
not recorded, so only prompts are found again."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf
from typing import NamedTuple

import numpy as np

from perfmodel.errors import WorkloadError
from perfmodel.sim.traffic.distributions import arrival_times, draw_lengths
from perfmodel.sim.traffic.traces import RecordedHashes, engine_blocks, read_conversations
from perfmodel.specs.traffic import Arrivals, Pause, Stage, Traffic

_CONTENT = 1 << 32  # numbers of one conversation's blocks
_SYSTEM = 1 << 61  # offset of the numbers of groups' system prompts
_NO_PAUSE = Pause(mean_s=0.0, distribution="fixed")
_LOOKED_AT = 4096  # draws that estimate the mean number of turns


class Turn(NamedTuple):
    """Tokens added to the prompt, tokens answered, and the pause since the last answer in seconds."""

    num_new_tokens: int
    num_output_tokens: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """arrival_s: first turn; None in a closed loop. num_system_tokens: system prompt, which `group` shares.
    hashes: of a recorded session's prompts, whose turns' `num_new_tokens` are whole prompts"""

    arrival_s: float | None
    turns: tuple[Turn, ...]
    num_system_tokens: int = 0
    group: int = 0
    hashes: RecordedHashes | None = None


class TurnPrompt(NamedTuple):
    """A turn as a request. block_contents: of the full blocks of prompt and answer; after: see `RecordedHashes`; None:
    the turn before"""

    num_prompt_tokens: int
    num_output_tokens: int
    block_contents: tuple[int, ...]
    pause_s: float
    after: int | None = None


def turns_of(conversation: Conversation, number: int, block_size: int, max_model_len: int) -> Iterator[TurnPrompt]:
    """Turns of conversation `number`, as many as fit.

    block_size: tokens of a KV block; max_model_len: longest prompt plus answer in tokens"""
    length, shared = conversation.num_system_tokens, conversation.num_system_tokens // block_size
    system = _SYSTEM + conversation.group * _CONTENT
    hashes = conversation.hashes
    for place, turn in enumerate(conversation.turns):
        prompt = length + turn.num_new_tokens
        if prompt >= max_model_len:
            return
        outputs = min(turn.num_output_tokens, max_model_len - prompt)
        if hashes is not None:
            blocks = [conversation.group * _CONTENT + block for block in hashes.blocks[place]]
            contents = engine_blocks(prompt, blocks, hashes.block_size, block_size)
            yield TurnPrompt(prompt, outputs, contents, turn.pause_s, hashes.after[place])
            continue
        length = prompt + outputs
        own = range(number * _CONTENT + shared, number * _CONTENT + length // block_size)
        yield TurnPrompt(prompt, outputs, (*range(system, system + shared), *own), turn.pause_s)


def drawn_conversations(traffic: Traffic, streams: list[np.random.Generator], longest: int) -> Iterator[Conversation]:
    """Conversations drawn from `traffic`, endlessly or until its `duration_s`.

    streams: for arrivals, inputs, answers, turns and groups, pauses; longest: tokens at which lengths are clipped"""
    spec = traffic.conversations
    assert spec is not None
    assert spec.turns is not None
    assert traffic.input_tokens is not None
    assert traffic.output_tokens is not None
    for_arrivals, for_inputs, for_outputs, for_turns, for_pauses = streams
    drawn = islice(draw_lengths(spec.turns, np.random.default_rng(0), _CONTENT), _LOOKED_AT)
    arrivals = slowed(traffic.arrivals, float(spec.turns.value or np.mean(list(drawn))))
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
    """Conversations of the traffic's trace, at its times or the given arrivals; missing fields are drawn.

    streams, longest: see `drawn_conversations`. Raises WorkloadError for a file that cannot be read or lacks what
    nothing else provides."""
    trace, for_answers, for_pauses = traffic.trace, streams[2], streams[4]
    assert trace is not None
    recorded = list(read_conversations(trace.path, trace.format))
    follows_trace = traffic.arrivals.process == "trace"
    if follows_trace and recorded[0].arrival_s is None:
        raise WorkloadError(f"{trace.path}: has no arrival_s; give traffic.arrivals, such as a rate.")
    lengths = [turn.num_output_tokens for conversation in recorded for turn in conversation.turns]
    if traffic.output_tokens is None and None in lengths:
        raise WorkloadError(f"{trace.path}: has turns without output_length; give traffic.output_tokens.")
    answers = draw_lengths(traffic.output_tokens, for_answers, longest) if traffic.output_tokens else iter(())
    pause = traffic.conversations.think_time if traffic.conversations is not None else _NO_PAUSE
    longest_pause = inf if trace.max_pause_s is None else trace.max_pause_s
    loop, times_read = traffic.arrivals.concurrency or 0, trace.repeat or 1
    if traffic.has_sessions and trace.repeat is None:
        times_read = max(-(-2 * loop // len(recorded)), 1)
    if loop > len(recorded) * times_read and traffic.has_sessions:
        raise WorkloadError(
            f"{trace.path}: has {len(recorded)} sessions, which trace.repeat={times_read} makes fewer than "
            f"arrivals.concurrency={loop}; leave trace.repeat out, or raise it"
        )
    mean = len(lengths) / len(recorded)
    times = arrival_times(slowed(traffic.arrivals, mean), traffic.duration_s, streams[0])
    first = recorded[0].arrival_s or 0.0
    for number, (conversation, time) in enumerate(zip(recorded * times_read, times, strict=False)):
        arrival = ((conversation.arrival_s or 0.0) - first) / trace.speedup if follows_trace else time
        if traffic.duration_s is not None and arrival is not None and arrival > traffic.duration_s:
            return
        turns = [
            Turn(
                turn.num_new_tokens,
                turn.num_output_tokens or next(answers),
                min(_drawn_pause(pause, for_pauses) if turn.pause_s is None else turn.pause_s, longest_pause)
                / trace.speedup,
            )
            for turn in conversation.turns
        ]
        hashes, group = conversation.hashes, 0
        if hashes is not None:  # whose blocks they are: of all sessions of a file read once, or of this one
            group = number // len(recorded) if hashes.is_global else number
        yield Conversation(arrival, tuple(turns), conversation.num_system_tokens, group, hashes)


def ideal_cached_tokens(traffic: Traffic) -> list[list[int]]:
    """Prompt tokens, by session and turn of a trace of agents' sessions, that a cache without bounds would have from
    the prompts before, in the order of the file."""
    assert traffic.trace is not None
    result: list[list[int]] = []
    seen: set[int] = set()
    for session in read_conversations(traffic.trace.path, traffic.trace.format):
        hashes = session.hashes
        assert hashes is not None
        seen = seen if hashes.is_global else set()
        result.append([])
        for blocks in hashes.blocks:
            result[-1].append(sum(1 for _ in takewhile(seen.__contains__, blocks)) * hashes.block_size)
            seen.update(blocks)
    return result


def _drawn_pause(pause: Pause, rng: np.random.Generator) -> float:
    return pause.mean_s if pause.distribution == "fixed" else float(rng.exponential(pause.mean_s))


def slowed(arrivals: Arrivals, times: float) -> Arrivals:
    """Request arrivals as conversation arrivals: rates divided by `times`."""
    stages = tuple(Stage(rate=stage.rate / times, duration_s=stage.duration_s) for stage in arrivals.stages)
    rate = None if arrivals.rate is None else arrivals.rate / times
    return arrivals.model_copy(update={"rate": rate, "stages": stages})
