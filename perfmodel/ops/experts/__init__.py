"""Mixtures of experts: which experts tokens go to, what they compute, and the layer around them."""

__all__: list[str] = []
