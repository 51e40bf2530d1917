"""The one table of kernels: operator -> backend -> where its implementation is.

Implementations are named, not imported, so that a backend's library (triton) is needed only by who uses it.
A faster kernel is one file beside `reference.py` and one entry here; what a backend lacks falls back to `torch`.
"""

__all__ = ["KERNELS", "Kernels", "check_capability", "check_interpreter", "load_kernels"]

import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError

_INTERPRETS_NEW_NUMPY, _STRICT_NUMPY = (3, 7), (2, 4)
_HERE = "perfmodel_executors.kernels"
_OLDEST = 80  # compute capability of Ampere; on sm_75 Triton compiles matrix products without tensor cores

KERNELS: dict[str, dict[str, str]] = {
    "activate": {"torch": f"{_HERE}.swiglu.reference", "triton": f"{_HERE}.swiglu.triton"},
    "add_rms_norm": {"torch": f"{_HERE}.rms_norm.reference", "triton": f"{_HERE}.rms_norm.triton"},
    "attention_decode": {
        "torch": f"{_HERE}.attention_decode.reference",
        "triton": f"{_HERE}.attention_decode.triton",
    },
    "attention_prefill": {
        "torch": f"{_HERE}.attention_prefill.reference",
        "triton": f"{_HERE}.attention_prefill.triton",
    },
    "attention_sinks_decode": {"torch": f"{_HERE}.attention_sinks.reference"},
    "attention_sinks_prefill": {"torch": f"{_HERE}.attention_sinks.reference"},
    "attention_sparse_decode": {"torch": f"{_HERE}.attention_sparse.reference"},
    "attention_sparse_prefill": {"torch": f"{_HERE}.attention_sparse.reference"},
    "attention_standard": {
        "torch": f"{_HERE}.attention_standard.reference",
        "triton": f"{_HERE}.attention_standard.triton",
    },
    "greedy": {"torch": f"{_HERE}.sampling.reference", "triton": f"{_HERE}.sampling.triton"},
    "grouped_experts": {"torch": f"{_HERE}.moe.reference", "triton": f"{_HERE}.moe.grouped.triton"},
    "kv_write": {"torch": f"{_HERE}.kv_write.reference"},
    "linear": {"torch": f"{_HERE}.linear.reference", "triton": f"{_HERE}.linear.triton"},
    "linear_fp8": {
        "torch": f"{_HERE}.linear_low_precision.reference",
        "triton": f"{_HERE}.linear_low_precision.triton",
    },
    "linear_sparse24": {"torch": f"{_HERE}.linear_sparse24.reference"},
    "linear_w4a16": {"torch": f"{_HERE}.linear_weight_only.reference", "triton": f"{_HERE}.linear_weight_only.triton"},
    "linear_w8a16": {"torch": f"{_HERE}.linear_weight_only.reference", "triton": f"{_HERE}.linear_weight_only.triton"},
    "linear_w8a8": {
        "torch": f"{_HERE}.linear_low_precision.reference",
        "triton": f"{_HERE}.linear_low_precision.triton",
    },
    "rms_norm": {"torch": f"{_HERE}.rms_norm.reference", "triton": f"{_HERE}.rms_norm.triton"},
    "rope": {"torch": f"{_HERE}.rope.reference"},
    "rope_kv_write": {"torch": f"{_HERE}.rope_kv_write.reference", "triton": f"{_HERE}.rope_kv_write.triton"},
    "route": {"torch": f"{_HERE}.moe.reference", "triton": f"{_HERE}.moe.route.triton"},
    "sample_top_k_top_p": {"torch": f"{_HERE}.sampling.reference", "triton": f"{_HERE}.sampling.triton"},
    "verify_greedy": {"torch": f"{_HERE}.rejection_sampling.reference"},
    "verify_stochastic": {"torch": f"{_HERE}.rejection_sampling.reference"},
}


class Kernels:
    """The chosen implementation of every operator, as attributes: `kernels.rms_norm(x, weight, eps)`."""

    __slots__ = tuple(KERNELS)

    activate: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    attention_decode: Callable[..., Any]
    attention_prefill: Callable[..., Any]
    attention_sinks_decode: Callable[..., Any]
    attention_sinks_prefill: Callable[..., Any]
    attention_sparse_decode: Callable[..., Any]
    attention_sparse_prefill: Callable[..., Any]
    attention_standard: Callable[..., Any]
    greedy: Callable[..., Any]
    grouped_experts: Callable[..., Any]
    kv_write: Callable[..., Any]
    linear: Callable[..., Any]
    linear_fp8: Callable[..., Any]
    linear_sparse24: Callable[..., Any]
    linear_w4a16: Callable[..., Any]
    linear_w8a16: Callable[..., Any]
    linear_w8a8: Callable[..., Any]
    rms_norm: Callable[..., Any]
    rope: Callable[..., Any]
    rope_kv_write: Callable[..., Any]
    route: Callable[..., Any]
    sample_top_k_top_p: Callable[..., Any]
    verify_greedy: Callable[..., Any]
    verify_stochastic: Callable[..., Any]


def load_kernels(backend: str = "torch", device: torch.device | None = None) -> Kernels:
    """The implementations of `backend`, with torch's where it has none; for `device`, if it is known already.

    Raises PerfmodelError for an unknown backend, one whose library is not installed, or a device it does not run on.
    """
    known = sorted({name for row in KERNELS.values() for name in row})
    if backend not in known:
        raise PerfmodelError(f"there are no {backend!r} kernels; known backends: {', '.join(known)}.")
    if backend == "triton":
        _check_library()
        if device is not None and device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            check_capability(torch.cuda.get_device_name(device), 10 * major + minor)
    kernels = Kernels()
    for operator, implementations in KERNELS.items():
        module = import_module(implementations.get(backend, implementations["torch"]))
        setattr(kernels, operator, getattr(module, operator))
    return kernels


def check_capability(device: str, capability: int) -> None:
    """Raises SpecError for a CUDA device without the tensor cores that Triton uses; capability: 80 for sm_80."""
    if capability < _OLDEST:
        raise SpecError(
            f"{device} is sm_{capability}, and Triton kernels need sm_{_OLDEST} or newer (older tensor cores are not "
            f"used and every product spills); use the torch kernels (--kernels torch)."
        )


def _check_library() -> None:
    if find_spec("triton") is None:
        raise MissingExtraError(
            "the triton kernels need triton, which is not installed: pip install 'perfmodel[executor]', or use the "
            "torch kernels (--kernels torch)."
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        check_interpreter(version("triton"), version("numpy"))


def check_interpreter(triton: str, numpy: str) -> None:
    """Raises MissingExtraError for versions that do not interpret: before 3.7 Triton makes integers of arrays with one
    element, which NumPy 2.4 refuses."""
    if _numbers(triton) < _INTERPRETS_NEW_NUMPY and _numbers(numpy) >= _STRICT_NUMPY:
        raise MissingExtraError(
            f"triton {triton} does not interpret kernels with numpy {numpy}, which makes no integers of arrays: "
            f"pip install 'numpy<2.4', or triton 3.7, or unset TRITON_INTERPRET."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(int(part) for part in version.split(".")[:2])
