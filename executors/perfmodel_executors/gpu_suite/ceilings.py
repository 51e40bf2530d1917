"""What the device can do at best: copies by size, library products by number format, launches."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch

from perfmodel_executors.gpu_suite.task import Bench
from perfmodel_executors.measure.device_timer import time_calls

_COPY_MIB = {"cuda": (32, 256, 2048), "cpu": (1, 8, 64)}
_SIDES = {"cuda": (4096, 8192), "cpu": (256, 512)}
_PRODUCTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_EMPTY_LAUNCHES = 200


def measure_device(bench: Bench) -> dict[str, Any]:
    device, kind = bench.device, bench.device.type
    gemms = {
        name: {str(side): _product(side, dtype, device) for side in _SIDES[kind]} for name, dtype in _PRODUCTS.items()
    }
    ceilings: dict[str, Any] = {
        "copy_bytes_per_s": {str(mib): _copy(mib, device) for mib in _COPY_MIB[kind]},
        "gemm_flops_per_s": gemms,
    }
    if kind == "cuda":
        with suppress(RuntimeError):  # a library without FP8
            # Through the library, on devices that have it (Ada, Hopper and newer).
            sides = _SIDES[kind] if torch.cuda.get_device_capability(device) >= (8, 9) else ()
            gemms["fp8"] = {str(side): _product(side, torch.float8_e4m3fn, device) for side in sides}
        x = torch.zeros(1, device=device)

        def launch() -> None:
            for _ in range(_EMPTY_LAUNCHES):
                x.add_(1.0)

        # Seconds from one tiny kernel to the next in a replayed graph.
        ceilings["graph_launch_s"] = time_calls([launch], device).seconds / _EMPTY_LAUNCHES
    return {name: value for name, value in ceilings.items() if value}


def _copy(mib: int, device: torch.device) -> float:
    source = torch.empty(mib << 20, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_calls([partial(target.copy_, source)], device).seconds


def _product(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs per second of a product of random matrices: zeros run faster, for the power that they do not draw."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    call = partial(torch.mm, a, b)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        call = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    return 2 * side**3 / time_calls([call], device).seconds
