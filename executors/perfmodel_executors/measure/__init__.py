"""Timing protocols and the calibration of this machine."""
