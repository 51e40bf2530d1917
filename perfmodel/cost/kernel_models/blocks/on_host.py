"""CPU-offloaded layers: the CPU computes small steps, the device large ones.

In steps of `from_tokens` tokens or more the device multiplies weights, read over its link once per micro-batch.
Operators without weights (attention over the host's KV) stay on the CPU.
Source: llama.cpp's --op-offload (ggml_backend_cuda_device_offload_op: batches of 32 and more).
"""

from collections.abc import Callable
from typing import Any, Literal

from perfmodel.cost.kernel_models.blocks.matmul import BlockMatmulFit, block_matmul_time, pieces
from perfmodel.cost.kernel_models.blocks.stream import BlockStreamFit, block_stream_time
from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.files.base import Spec
from perfmodel.files.units import NonNegativeInt, PositiveFloat
from perfmodel.ops.problem_sizes import ExpertsSize, GemmSize
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec


class OnHostFit(Spec):
    """What times an operator of such a layer.

    host: the CPU; on_cpu, on_device: fits of the operator there
    link_bytes_per_s: of the device to the host's memory; from_tokens: 0: the device never computes it
    """

    form: Literal["on_host"] = "on_host"
    host: HardwareSpec
    on_cpu: BlockMatmulFit | BlockStreamFit
    on_device: BlockMatmulFit | BlockStreamFit
    link_bytes_per_s: PositiveFloat
    from_tokens: NonNegativeInt
    residuals: Residuals = Residuals()


def on_host_time(work: Work, fit: OnHostFit, device: DeviceFacts) -> OperatorTime:
    tokens = _rows(work)
    if not (fit.from_tokens and tokens >= fit.from_tokens and isinstance(fit.on_device, BlockMatmulFit)):
        return _timer(fit.on_cpu)(work, fit.on_cpu, DeviceFacts.of(fit.host))
    there = block_matmul_time(work, fit.on_device, device)
    copies = sum(count for count, _ in pieces(tokens, fit.on_device.micro_batch))
    copied = copies * work.weight_bytes / fit.link_bytes_per_s
    duration = there.duration_s + copied
    return there._replace(
        duration_s=duration, communication_s=copied, bound="communication" if copied > there.duration_s else there.bound
    )


def _rows(work: Work) -> float:
    """Tokens multiplied with weights; 0 without weights."""
    if isinstance(work.problem, ExpertsSize):
        return float(work.problem.tokens)
    return float(work.problem.m) if isinstance(work.problem, GemmSize) else 0.0


def _timer(fit: BlockMatmulFit | BlockStreamFit) -> Callable[[Work, Any, DeviceFacts], OperatorTime]:
    return block_matmul_time if isinstance(fit, BlockMatmulFit) else block_stream_time
