"""Operators put together: layers of any kind, the graph of a whole step, the graph of a drafter's pass."""

__all__: list[str] = []
