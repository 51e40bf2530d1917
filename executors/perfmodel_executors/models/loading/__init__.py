"""Weights from files: what tensors are called, how files are read, how a decoder's weights are put together."""

__all__ = ["load_weights"]

from perfmodel_executors.models.loading.assemble import load_weights
