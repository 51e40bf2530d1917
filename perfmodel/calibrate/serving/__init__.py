"""Recorded serving runs: as scenarios, on the simulated clock, and the engine profile that explains them."""

__all__: list[str] = []
