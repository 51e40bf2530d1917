"""Scans over tokens with a state of constant size: Mamba-2 and the gated delta rule, in chunks and step by step."""
