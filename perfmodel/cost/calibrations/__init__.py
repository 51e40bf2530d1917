"""Calibrations: contents, files, transfer between devices, provenance and draws."""

__all__: list[str] = []
