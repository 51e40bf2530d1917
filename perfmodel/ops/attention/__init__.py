"""Softmax attention operators: prefill, decode, mixed kernels, MLA, and their layers."""

__all__: list[str] = []
