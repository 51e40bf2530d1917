"""Recorded steady states at a fixed concurrency: as scenarios, simulated, and what they say about an engine."""

__all__: list[str] = []
