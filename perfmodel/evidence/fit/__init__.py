"""From measured rows to calibrations."""
