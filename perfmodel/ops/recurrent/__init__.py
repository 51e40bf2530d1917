"""Mixers with a state of constant size: scans, linear attention, and their layers."""

__all__: list[str] = []
