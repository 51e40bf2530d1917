"""From a batch to its time: what a step takes, priced in picoseconds for the simulator and explained row by row."""
