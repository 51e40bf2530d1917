"""A function over many items, in processes of this machine or of a Ray cluster, answered in the items' order.

A process that is lost on the way (the kernel's out-of-memory killer, a crash in native code) costs only the item that
it had: the others go on, in processes that stand in for it. That item is tried once more at the end, when nothing else
takes memory; lost again, its answer is what the caller has for it.
"""

__all__ = ["Engine", "Progress", "engine_of", "num_workers", "spread"]

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from perfmodel.errors import SpecError, did_you_mean

Progress = Callable[[int, int | None], None]
T = TypeVar("T")
R = TypeVar("R")

_FEWEST = 8  # items for which starting processes (a second) may pay
_ENGINES = ("local", "ray")


@dataclass(frozen=True, slots=True)
class Engine:
    """Where items are worked on. address: of a Ray cluster, where it is not this machine's own."""

    name: str
    address: str | None = None


def engine_of(text: str) -> Engine:
    """`local`, `ray` or `ray:ADDRESS` (`ray:auto`: a cluster that runs here). Raises SpecError for anything else."""
    name, colon, address = text.partition(":")
    if name not in _ENGINES or (name == "local" and colon) or (colon and not address):
        near = did_you_mean(name, _ENGINES)
        raise SpecError(f"--engine {text}: allowed local, ray or ray:ADDRESS (as in ray:auto).{near}")
    return Engine(name, address or None)


def num_workers(num_items: int) -> int:
    """Processes worth starting for so many items."""
    return min(len(os.sched_getaffinity(0)), num_items) if num_items >= _FEWEST else 1


def spread(
    function: Callable[[T], R],
    items: Sequence[T],
    if_lost: Callable[[T, str], R],
    progress: Progress | None = None,
    workers: int | None = None,
    engine: str = "local",
) -> list[R]:
    """`function` of each item, in order; both must be picklable (a function of a module, not a lambda).

    if_lost:  the answer for an item whose process was lost twice, from the item and the reason
    progress: called with (items done, items in all)
    workers:  processes; by default as many as this one may use cores (on Ray: as the cluster has), none for a few
              items. With 1, locally, everything runs in this process, and is lost with it.
    engine:   local | ray | ray:ADDRESS

    Raises what the function raises, and MissingExtraError where Ray is asked for and not installed.
    """
    where = engine_of(engine)
    count = num_workers(len(items)) if workers is None else min(workers, len(items))
    if where.name == "local" and count <= 1:
        return _here(function, items, progress)
    answers: dict[int, Any] = {}

    def on_answer(index: int, answer: Any) -> None:
        answers[index] = answer
        if progress is not None:
            progress(len(answers), len(items))

    run = _local(count) if where.name == "local" else _ray(where.address, workers)
    lost = run(function, list(enumerate(items)), on_answer, None)
    for index, _ in sorted(lost):
        again = run(function, [(index, items[index])], on_answer, 1)
        for _, reason in again:
            on_answer(index, if_lost(items[index], f"{reason}, twice"))
    return [answers[index] for index in range(len(items))]


# Works on (index, item) pairs, hands each answer on, and returns (index, reason) of those that were lost; the last
# argument limits the processes.
Numbered = list[tuple[int, Any]]
OnAnswer = Callable[[int, Any], None]
RunItems = Callable[[Callable[[Any], Any], Numbered, OnAnswer, int | None], list[tuple[int, str]]]


def _here(function: Callable[[T], R], items: Sequence[T], progress: Progress | None) -> list[R]:
    found = []
    for done, item in enumerate(items, 1):
        found.append(function(item))
        if progress is not None:
            progress(done, len(items))
    return found


def _local(count: int) -> RunItems:
    from perfmodel.plan.processes import run_in_processes

    return lambda function, items, on_answer, most: run_in_processes(function, items, on_answer, most or count)


def _ray(address: str | None, workers: int | None) -> RunItems:
    from perfmodel.plan.on_ray import run_on_ray

    return lambda function, items, on_answer, most: run_on_ray(function, items, on_answer, most or workers, address)
