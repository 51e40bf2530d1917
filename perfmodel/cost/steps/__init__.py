"""Step times: in picoseconds for the simulator, and row by row for explanations."""
