"""Kernels in Triton: of each operator that has one, beside its definition in torch one folder up."""
