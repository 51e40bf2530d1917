"""Recorded steady states at a fixed concurrency: as scenarios, simulated, and what they tell of an engine."""

__all__: list[str] = []
