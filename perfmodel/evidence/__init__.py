"""Evidence: measurements, their predictions, the errors, and fits.

sources:  readers, one per format, from files to rows
predict:  a prediction per row, by the simulation and step estimate that users run
kinds:    `validate KIND`: rows and predictions as a report (`report`)
fit:      from rows to calibrations
executed: simulated vs. executed, on this machine or a measured device"""

__all__ = ["ErrorStats", "Rows", "ValidationReport"]

from perfmodel.evidence.report import ErrorStats, Rows, ValidationReport
