"""Figures of engines for single machines (llama-bench, LocalScore, MLX) as steps, and backends fitted to them."""

__all__: list[str] = []
