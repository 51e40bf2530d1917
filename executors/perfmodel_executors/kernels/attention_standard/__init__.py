"""Attention that keeps its scores in memory: what flash attention is compared with."""
