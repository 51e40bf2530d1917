"""Fits of LoRA adapters, shared by all devices: `hardware_specs/calibrations/adapters.yaml`.

They are vLLM's, fitted by `benchmarks/adapters.py` to published runs: steps with one to 67 adapters, and single loads.
"""

from pydantic import Field

from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted


class AdapterFits(CommittedFits):
    """kernels: of grouped kernels, an item being a thread block; copy_s: of one matrix to a slot; file_s,
    file_bytes_per_s: to read an adapter through the host's file cache and to make it ready there"""

    kernels: FamilyFit
    copy_s: float = Field(ge=1e-7, le=1e-3)
    file_s: float = Field(ge=0, le=1)
    file_bytes_per_s: float = Field(ge=1e7, le=1e11)


def load_adapter_fits() -> AdapterFits:
    """The committed fits. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(AdapterFits, data_dir("calibrations") / "adapters.yaml")
