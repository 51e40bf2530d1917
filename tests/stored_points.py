"""A store of evaluated points, with what tests ask of it."""

__all__ = ["StoredPoints"]

from perfmodel.planning.points import Record
from perfmodel.planning.sweep import Store


class StoredPoints(Store):
    """A store that counts its points and their evaluations."""

    def __len__(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM points")[0][0])

    def records(self) -> dict[str, Record]:
        """All records by key."""
        return {key: self._record(text) for key, text in self._rows("SELECT key, record FROM points ORDER BY key")}

    def most_evaluations(self) -> int:
        """Largest number of evaluations of one point: 1 if no work was repeated."""
        return int(self._rows("SELECT COALESCE(MAX(times), 0) FROM points")[0][0])
