"""Techniques: which there are, and whether they gain what the simulator says when they are executed."""
