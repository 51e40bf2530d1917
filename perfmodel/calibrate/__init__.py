"""From measured kernel tables to calibrations: readers, sanity checks, robust fits.

`tables` reads a folder of measurements into columns; one file per kind of kernel turns rows into the sizes of a
physical form (`perfmodel.cost.forms`); `robust` fits a form's parameters to them. Needs scipy, and pyarrow to read
parquet files.
"""

__all__ = ["Group", "KernelTable", "fit_form", "read_table"]

from perfmodel.calibrate.robust import fit_form
from perfmodel.calibrate.tables import Group, KernelTable, read_table
