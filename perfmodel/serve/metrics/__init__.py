"""Metrics of an emulator's engines under the names of the servers that it stands for."""

__all__ = ["HttpCounts", "Metrics", "MetricsPage", "content_type", "wants_openmetrics"]

from perfmodel.serve.metrics.counts import content_type, wants_openmetrics
from perfmodel.serve.metrics.recorder import HttpCounts, Metrics, MetricsPage
