"""Simulated vs. executed, on this machine or on a device that was measured before."""
