"""One engine on the simulated clock: its ranks step together, for as long as the cost model says."""
