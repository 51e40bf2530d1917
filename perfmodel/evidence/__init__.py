"""Evidence: what was measured, what is predicted for it, how far apart they are, and what is fitted to it.

sources:  readers, one per format, from files to rows
predict:  a prediction for each row, by the same simulation and step estimate that users run
kinds:    `validate KIND`: rows and predictions as one report (`report`)
fit:      from rows to calibrations, one file per kind of truth
executed: simulated vs. executed, on this machine or on a device that was measured before
"""

__all__ = ["ErrorStats", "Rows", "ValidationReport"]

from perfmodel.evidence.report import ErrorStats, Rows, ValidationReport
