"""How much of what a kernel's fit leaves unexplained all its calls in one run have in common.

One file, `hardware_specs/calibrations/kernel_errors.yaml`, written by `perfmodel calibrate --kernel-errors`. A fit's
residuals are over all shapes of a table; a run has the shapes of one model. What such a shape is off by at all batches
and lengths stays in the run, what it is off by at single ones averages out.
"""

import datetime

from pydantic import Field

from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import load_fitted

_FILE = "kernel_errors.yaml"


class KernelErrors(Spec):
    """common: by operator family, the standard deviation that all calls share over that of the residuals"""

    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    common: dict[str, float] = Field(min_length=1)

    def of(self, family: str) -> float:
        """The share of a family; of one that no table has, the mean of its kind (all attention), else of all."""
        if family in self.common:
            return self.common[family]
        kind = family.split("_")[0]
        alike = [share for name, share in self.common.items() if name.split("_")[0] == kind]
        shares = alike or list(self.common.values())
        return sum(shares) / len(shares)


def load_kernel_errors() -> KernelErrors:
    """The committed shares. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(KernelErrors, data_dir("calibrations") / _FILE)
