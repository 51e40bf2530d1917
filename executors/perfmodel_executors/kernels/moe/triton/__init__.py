"""Mixture of experts on a GPU: who goes where (`route`, `sort`, `tile`), and both products of all experts (`experts`).

Experts in 8 or 4 bits have kernels of their own (`stored`).
"""

from perfmodel_executors.kernels.moe.triton.experts import grouped_experts
from perfmodel_executors.kernels.moe.triton.route import route

__all__ = ["grouped_experts", "route"]
