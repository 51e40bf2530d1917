"""`Rotations`: the rows of the rotary tables that a step needs, each looked up once for all layers."""

__all__ = ["Rotations"]

from collections.abc import Mapping

from torch import Tensor


class Rotations:
    """Rotations of tokens at `positions`, by the tables [positions, H] of each size of a head."""

    def __init__(self, tables: Mapping[int, Tensor], positions_T: Tensor) -> None:
        self.tables = tables
        self._positions_T = positions_T
        self._rows: dict[tuple[int, int | None], Tensor] = {}

    def rows(self, dim: int, last: int | None = None) -> Tensor:
        """cos and sin of each token's position, [T, H]; of at most `last`."""
        key = (dim, last)
        if key not in self._rows:
            positions_T = self._positions_T if last is None else self._positions_T.clamp(max=last)
            self._rows[key] = self.tables[dim][positions_T]
        return self._rows[key]
