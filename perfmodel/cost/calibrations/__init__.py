"""Calibrations: what they hold, their files, where they come from, how they pass on, and draws of them."""

__all__: list[str] = []
