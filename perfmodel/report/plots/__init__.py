"""Plotly figures of runs and steps."""
