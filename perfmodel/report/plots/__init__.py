"""Interactive plots of runs and steps, with plotly."""
