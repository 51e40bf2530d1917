"""Recorded offline throughput as scenarios: all requests there at once, output tokens per second and device."""
