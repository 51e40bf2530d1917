"""Which steps to time: a grid over the range of shapes that a scenario can produce, none taken from its workload."""

import math
from itertools import product
from typing import NamedTuple

from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Lengths
from perfmodel_executors.measure.bench import StepGrants

# The step that every sample is paired with: long enough for the clock, short enough to be run between all others.
REFERENCE = StepGrants(contexts=(192, 192))
REFERENCE_WITHOUT_CACHE = StepGrants(chunks=((16, 0, True),) * 2)

_MAX_BATCH = 32
_MAX_CHUNK = 1024
_MAX_CONTEXT = 4096
_DEFAULT_LENGTH = 512


class StepRange(NamedTuple):
    """The largest batch of decodes, context of a decode, and prompt chunk that the grid has to reach. max_queries: of a
    decode that verifies drafts; max_tokens: of whole sequences, None: a KV cache; exits: behind which decodes leave."""

    max_batch: int = 16
    max_context: int = 1024
    max_chunk: int = 512
    max_queries: int = 1
    max_tokens: int | None = None
    exits: tuple[int, ...] = ()


def scenario_range(scenario: Scenario) -> StepRange:
    """The range that a scenario's engine limits and length distributions span, capped to what is quick to time."""
    engine, traffic = scenario.engine, scenario.traffic
    batch = min(engine.max_num_seqs, traffic.num_requests or _MAX_BATCH, traffic.arrivals.concurrency or _MAX_BATCH)
    prompt, output = _longest(traffic.input_tokens), _longest(traffic.output_tokens)
    limit = min(engine.max_model_len or _MAX_CONTEXT, scenario.model.max_position_embeddings, _MAX_CONTEXT)
    exits = dict.fromkeys((1, max(1, scenario.model.num_layers // 2)))  # behind the first layer, and half of them
    return StepRange(
        max_batch=max(1, min(batch, _MAX_BATCH)),
        max_context=max(32, min(prompt + output, limit)),
        max_chunk=max(16, min(prompt * 2, engine.max_num_batched_tokens, limit, _MAX_CHUNK)),
        max_queries=1 if engine.speculative_config is None else 1 + engine.speculative_config.nodes_by_depth[-1],
        max_tokens=min(engine.max_num_batched_tokens, _MAX_CONTEXT) if engine.kv_cache == "off" else None,
        exits=() if scenario.model.exits is None else tuple(exits),
    )


def _longest(lengths: Lengths | None) -> int:
    if lengths is None:
        return _DEFAULT_LENGTH
    known = lengths.value or lengths.high or lengths.p99 or (lengths.values and max(lengths.values))
    if not known:
        mean = lengths.mean or _DEFAULT_LENGTH
        known = mean + 2.5 * (lengths.std or mean)
    return math.ceil(min(known, lengths.max or known))


def calibration_grid(span: StepRange) -> list[StepGrants]:
    """Decodes over batch and context, chunks over length and prefix, mixtures: about 35 steps; with drafts, 15 more."""
    if span.max_tokens is not None:
        return _whole_sequences(span, span.max_tokens)
    low, high = min(24, span.max_context), span.max_context
    middle = round(math.sqrt(low * high))
    decodes = product(_geometric(1, span.max_batch, 6), sorted({low, middle, high}))
    steps = [StepGrants(contexts=(context,) * batch) for batch, context in decodes]
    chunks = _geometric(8, span.max_chunk, 6)
    steps += [StepGrants(chunks=((chunk, 0, True),)) for chunk in chunks]
    steps += [StepGrants(chunks=((chunk, middle, False),)) for chunk in chunks[1::2] if chunk + middle <= high]
    half = max(2, span.max_chunk // 3)
    steps.append(StepGrants(chunks=((half, 0, True), (half // 2, 0, True))))
    batches = _geometric(2, span.max_batch, 3)
    steps += [StepGrants((middle,) * batch, ((chunk, 0, True),)) for batch, chunk in product(batches, chunks[1::2])]
    some = _geometric(1, span.max_batch, 4)
    if span.max_queries > 1:
        verified = product(some, _geometric(2, span.max_queries, 2), (low, high))
        steps += [StepGrants((context,) * batch, queries=queries) for batch, queries, context in verified]
        steps.append(StepGrants(contexts=(middle,) * batches[-1], chunks=((chunks[1], 0, True),), queries=2))
    leaving = product(span.exits, some, (low, high))
    steps += [StepGrants((context,) * batch, layers=layers) for layers, batch, context in leaving]
    return list(dict.fromkeys(steps))


def _whole_sequences(span: StepRange, max_tokens: int) -> list[StepGrants]:
    """Equally long sequences, over their number and length, and some of two lengths."""
    batches, lengths = _geometric(1, span.max_batch, 5), _geometric(8, span.max_context, 7)
    shapes = [[length] * batch for batch in batches for length in lengths]
    shapes += [[long] + [lengths[0]] * batch for batch in batches for long in lengths[1::2]]
    steps = [StepGrants(chunks=tuple((n, 0, True) for n in shape)) for shape in shapes if sum(shape) <= max_tokens]
    return list(dict.fromkeys(steps)) or [StepGrants(chunks=((max_tokens, 0, True),))]


def drafting_grid(span: StepRange, max_queries: int, computes_prompts: bool) -> list[StepGrants]:
    """Passes of a drafter, prompts too if it has a KV cache; max_queries: tokens of a sequence in its widest pass."""
    low, high = min(24, span.max_context), span.max_context
    passes = product(_geometric(1, span.max_batch, 4), (low, high), _geometric(1, max_queries, 3))
    steps = [StepGrants((context,) * batch, queries=queries) for batch, context, queries in passes]
    if computes_prompts:
        steps += [StepGrants(chunks=((chunk, 0, False),)) for chunk in _geometric(8, span.max_chunk, 4)]
    return list(dict.fromkeys(steps))


def _geometric(low: int, high: int, count: int) -> list[int]:
    """About `count` distinct integers from `low` to `high`, evenly spaced in their logarithms."""
    if high <= low:
        return [high]
    ratio = (high / low) ** (1 / (count - 1))
    return sorted({round(low * ratio**i) for i in range(count)})
