"""Scenarios on an inference engine that is installed, or serves, on this machine. Needs no torch of its own."""
