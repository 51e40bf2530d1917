"""Kernels on weights in block formats (GGUF, MLX), as engines for a single machine run them, whatever the backend."""

__all__: list[str] = []
