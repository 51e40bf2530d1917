"""Kernels of single-machine engines on block-quantized weights (GGUF, MLX), for any backend."""

__all__: list[str] = []
