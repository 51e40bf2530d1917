"""Predicted beside measured, for each kind of truth."""

__all__ = ["ErrorStats", "Rows", "ValidationReport"]

from perfmodel.validate.report import ValidationReport
from perfmodel.validate.rows import ErrorStats, Rows
