"""Predictions for measured rows, by the simulation and step estimate that users run."""
