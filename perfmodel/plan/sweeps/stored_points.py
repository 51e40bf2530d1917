"""`remembered`: a point's record from a store, else evaluated, maybe in another process, and kept once it is known.

What a lost worker leaves is no record of the point and is not kept.
"""

__all__ = ["Kept", "remembered"]

from dataclasses import dataclass
from pathlib import Path

from perfmodel.plan.sweeps.points import Point, Record, evaluate_timed
from perfmodel.plan.sweeps.store import Store, key_of_point
from perfmodel.plan.sweeps.workers import Stepwise


@dataclass(frozen=True)
class Kept:
    """A point, and the file of the store that has its record, or is to have it."""

    point: Point
    store: str


class _Chain:
    """One step, or none where the record is known."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self._key = kept, key_of_point(kept.point)
        store = Store(Path(kept.store))
        self._record = store.get(self._key)
        store.close()

    def wanted(self) -> tuple[Point, ...]:
        return () if self._record is not None else (self._kept.point,)

    def take(self, answer: tuple[Record, float]) -> None:
        store = Store(Path(self._kept.store))
        store.put(self._key, *answer)
        store.close()
        self._record = answer[0]

    def result(self) -> Record:
        assert self._record is not None  # nothing is wanted any more
        return self._record


# Raises SpecError for overrides that are wrong.
remembered: Stepwise[Kept, Record] = Stepwise(_Chain, evaluate_timed)
