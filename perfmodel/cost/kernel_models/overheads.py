"""Overheads from single published figures, where no table or run has more: messages over PCIe, launches without CUDA
graphs, sampling, memory of graphs and communicators, attention's softmax.

One file, `hardware_specs/calibrations/overheads.yaml`, written by `perfmodel calibrate --overheads`, and by `--softmax`
from layer profiles of two cards."""

from pydantic import Field

from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted


class OverPcieFit(Spec):
    """What messages take over PCIe: fractions of the link's declared rate, hops of NCCL's low-latency protocol.

    hop_s:               between devices that see each other's memory
    hop_through_host_s:  between those that do not: a write to the host's memory, and a read by the other device
    low_latency_fraction, simple_fraction, simple_start_s: of NCCL's protocols (`CollectiveFit`)
    through_host_fraction: of the simple protocol through the host's memory
    kernels_fraction:    of kernels that read their peer's memory"""

    hop_s: float = Field(ge=1e-7, le=2e-5)
    hop_through_host_s: float = Field(ge=1e-7, le=2e-5)
    low_latency_fraction: float = Field(ge=0.05, le=0.8)
    simple_fraction: float = Field(ge=0.3, le=1.0)
    simple_start_s: float = Field(ge=1e-8, le=1e-4)
    through_host_fraction: float = Field(ge=0.1, le=1.0)
    kernels_fraction: float = Field(ge=0.1, le=1.0)


class OverheadFits(CommittedFits):
    """The fits, and where they come from.

    engine_launch_s: host time of an operator whose kernels a serving engine launches, its model's Python between
                     launches included
    sampling_bytes_per_logit: memory traffic of top-k and top-p sampling under engines without one of their own
    graph_pool_bytes, graph_bytes: memory of CUDA graphs, and of each: vLLM measures the first and a second one, and
                     counts the second for each of the others (vllm/v1/worker/gpu_model_runner.py)
    communicator_bytes: of NCCL's buffers on a device
    softmax_ops:     vector operations for each score of attention"""

    over_pcie: OverPcieFit
    engine_launch_s: float = Field(ge=1e-6, le=1e-3)
    sampling_bytes_per_logit: float = Field(ge=10, le=2000)
    graph_pool_bytes: float = Field(ge=0, le=1e10)
    graph_bytes: float = Field(ge=0, le=1e9)
    communicator_bytes: float = Field(ge=0, le=1e10)
    softmax_ops: float = Field(ge=1, le=200)


def load_overheads() -> OverheadFits:
    """The committed fits. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(OverheadFits, data_dir("calibrations") / "overheads.yaml")
