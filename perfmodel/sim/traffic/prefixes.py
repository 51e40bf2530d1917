"""Shared prefixes: which KV blocks of a prompt have content that other prompts have too.

Content is a number per block. Groups share their first blocks; with `num_prompts_per_group`, whole prompts repeat.
"""

__all__ = ["prefix_plan"]

from collections.abc import Iterator

import numpy as np

from perfmodel.specs.traffic import Prefix

_GROUP = 1 << 32  # content numbers of one group's prefix
_PROMPT = 1 << 62  # offset of the content numbers of whole prompts


def prefix_plan(
    prefix: Prefix | None, lengths: Iterator[int], rng: np.random.Generator, block_size: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(prompt tokens, content of its leading full blocks) for each request; the length includes the shared prefix.

    lengths: of the prompts, in tokens; rng: draws the group; block_size: tokens of a block
    """
    if prefix is None:
        return ((length, ()) for length in lengths)
    if prefix.num_prompts_per_group is None:
        return _groups(prefix, lengths, rng, block_size)
    return _repeated_prompts(prefix, lengths, rng, block_size)


def _shared(group: int, num_blocks: int) -> tuple[int, ...]:
    return tuple(range(group * _GROUP, group * _GROUP + num_blocks))


def _groups(
    prefix: Prefix, lengths: Iterator[int], rng: np.random.Generator, block_size: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    for length in lengths:
        group = int(rng.integers(prefix.num_groups))
        yield length, _shared(group, min(prefix.shared_tokens, length) // block_size)


def _repeated_prompts(
    prefix: Prefix, lengths: Iterator[int], rng: np.random.Generator, block_size: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The distinct prompts in one random order, over and over."""
    assert prefix.num_prompts_per_group is not None
    count = prefix.num_groups * prefix.num_prompts_per_group
    prompts: list[tuple[int, tuple[int, ...]]] = []
    for number in range(count):
        length = next(lengths)
        shared = min(prefix.shared_tokens, length) // block_size
        first = _PROMPT + number * _GROUP
        own = tuple(range(first, first + length // block_size - shared))
        prompts.append((length, _shared(number // prefix.num_prompts_per_group, shared) + own))
    order = rng.permutation(count)
    while True:
        for number in order:
            yield prompts[number]
