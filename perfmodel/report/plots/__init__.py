"""Figures of runs and steps, as plain data."""
