"""From measurements to calibrations: readers, sanity checks, robust fits, one room for each kind of truth.

kernels:  tables of measured kernels, fitted to the physical forms of `perfmodel.cost.forms`
serving:  recorded serving runs and their request logs, fitted to an engine's host and server
steady:   recorded steady states at a concurrency, fitted to what such an engine does beside kernels
measured: what our own programme measured on a device

`robust` fits a form's parameters, `profile_fit` an engine's, `whole_steps` those of a machine timed step by step;
`recorded` finds out what a folder holds. Needs scipy, and pyarrow to read parquet files.
"""

__all__ = ["fit_form"]

from perfmodel.calibrate.robust import fit_form
