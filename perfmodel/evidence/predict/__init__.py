"""Predictions for measured rows, by the simulation and the step estimate that users run."""
