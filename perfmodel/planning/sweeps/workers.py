"""A function over many items, in processes of this machine or of a Ray cluster, answered in the items' order.

A process that is lost on the way (the kernel's out-of-memory killer, a crash in native code) costs only the item that
it had: the others go on, in processes that stand in for it. That item is tried once more at the end, when nothing else
takes memory; lost again, its answer is what the caller has for it.

Where each step needs the answer of the one before it (a bisection), the function is `Stepwise`: only its steps travel;
what they add up to stays here, and so do files that are written meanwhile.
"""

__all__ = ["Chain", "Engine", "Progress", "Stepwise", "engine_of", "num_workers", "spread"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from perfmodel.cores import num_processes
from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.reach import within_reach

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
    """`local`, `ray`, `ray:HOST:PORT`, `ray:auto` (a cluster that runs here) or `ray://HOST:PORT` (Ray Client).

    Raises SpecError for anything else.
    """
    name, colon, address = text.partition(":")
    if name == "ray" and address.startswith("//"):
        address = text
    if name not in _ENGINES or (name == "local" and colon) or (colon and not address):
        near = did_you_mean(name, _ENGINES)
        raise SpecError(f"--engine {text}: allowed local, ray or ray:ADDRESS (as in ray:auto).{near}")
    return Engine(name, address or None)


def num_workers(num_items: int) -> int:
    """Processes worth starting for so many items."""
    return num_processes(num_items) if num_items >= _FEWEST else 1


class Chain(Protocol):
    """Steps of which each is known only when the one before it has its answer."""

    def wanted(self) -> tuple[Any, ...]:
        """The next step, alone, the same one until it has its answer; nothing when the chain is over."""

    def take(self, answer: Any) -> None:
        """The answer of the step that was wanted."""

    def result(self) -> Any:
        """What the steps add up to; asked once, when the chain is over."""


@dataclass(frozen=True)
class Stepwise(Generic[T, R]):
    """A function of an item that is a chain of steps.

    begin: the chain of an item, in the calling process
    step:  the answer of a step, in any process
    """

    begin: Callable[[T], Chain]
    step: Callable[[Any], Any]

    def __call__(self, item: T) -> R:
        chain = self.begin(item)
        while steps := chain.wanted():
            chain.take(self.step(*steps))
        result: R = chain.result()
        return result


def spread(
    function: Callable[[T], R],
    items: Sequence[T],
    if_lost: Callable[[T, str], R],
    progress: Progress | None = None,
    workers: int | None = None,
    engine: str = "local",
) -> list[R]:
    """`function` of each item, in order; both must be picklable (a function of a module, not a lambda; of a `Stepwise`
    one only the steps).

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
    run = _local(count) if where.name == "local" else _ray(where.address, workers)
    return _Spread(function, items, if_lost, progress).over(run)


# Steps by the number of their item. RunItems works on some, hands each answer on, goes on with what is to be done next
# for the same item, if anything, and returns (number, reason) of those that were lost; the last argument limits the
# processes.
Numbered = list[tuple[int, Any]]
OnAnswer = Callable[[int, Any], Numbered]
RunItems = Callable[[Callable[[Any], Any], Numbered, OnAnswer, int | None], list[tuple[int, str]]]


class _Spread(Generic[T, R]):
    """Items under way elsewhere."""

    def __init__(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        if_lost: Callable[[T, str], R],
        progress: Progress | None,
    ) -> None:
        self._items, self._if_lost, self._progress = items, if_lost, progress
        begin: Callable[[T], Chain] = _One
        self._step: Callable[[Any], Any] = function
        if isinstance(function, Stepwise):
            begin, self._step = function.begin, function.step
        self._step = within_reach(self._step)
        self._chains = [begin(item) for item in items]
        self._num_answers = [0] * len(items)
        self._results: dict[int, R] = {}

    def over(self, run: RunItems) -> list[R]:
        """All results, by `run`."""
        steps = [step for number in range(len(self._items)) for step in self._next(number)]
        for number, reason in sorted(run(self._step, steps, self._on_answer, None)):
            self._once_more(run, number, reason)
        return [self._results[number] for number in range(len(self._items))]

    def _once_more(self, run: RunItems, number: int, reason: str) -> None:
        """Go on with an item whose worker was lost, alone; a chain may lose one at several of its steps."""
        answers_before = -1
        while number not in self._results:
            if self._num_answers[number] == answers_before:
                self._finish(number, self._if_lost(self._items[number], f"{reason}, twice"))
                return
            answers_before = self._num_answers[number]
            lost = run(self._step, self._next(number), self._on_answer, 1)
            reason = lost[0][1] if lost else reason

    def _on_answer(self, number: int, answer: Any) -> Numbered:
        self._num_answers[number] += 1
        self._chains[number].take(answer)
        return self._next(number)

    def _next(self, number: int) -> Numbered:
        steps = self._chains[number].wanted()
        if not steps:
            self._finish(number, self._chains[number].result())
        return [(number, step) for step in steps]

    def _finish(self, number: int, result: R) -> None:
        self._results[number] = result
        if self._progress is not None:
            self._progress(len(self._results), len(self._items))


class _One:
    """An item that is one step."""

    def __init__(self, item: Any) -> None:
        self._steps: tuple[Any, ...] = (item,)
        self._answer: Any = None

    def wanted(self) -> tuple[Any, ...]:
        return self._steps

    def take(self, answer: Any) -> None:
        self._steps, self._answer = (), answer

    def result(self) -> Any:
        return self._answer


def _here(function: Callable[[T], R], items: Sequence[T], progress: Progress | None) -> list[R]:
    found = []
    for done, item in enumerate(items, 1):
        found.append(function(item))
        if progress is not None:
            progress(done, len(items))
    return found


def _local(count: int) -> RunItems:
    from perfmodel.planning.sweeps.processes import run_in_processes

    return lambda function, items, on_answer, most: run_in_processes(function, items, on_answer, most or count)


def _ray(address: str | None, workers: int | None) -> RunItems:
    from perfmodel.planning.sweeps.on_ray import run_on_ray

    return lambda function, items, on_answer, most: run_on_ray(function, items, on_answer, most or workers, address)
