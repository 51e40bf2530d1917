"""Figures of runs and steps, as plotly describes them."""
