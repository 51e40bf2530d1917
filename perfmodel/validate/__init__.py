"""Predicted beside measured, for each kind of truth."""

__all__ = ["ErrorStats", "Rows", "ValidationReport"]

from perfmodel.validate.report import ErrorStats, Rows, ValidationReport
