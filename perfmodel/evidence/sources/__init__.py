"""Measured data: readers, one per format, from files to rows."""
