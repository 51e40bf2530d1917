"""One engine replica on the simulated clock."""
