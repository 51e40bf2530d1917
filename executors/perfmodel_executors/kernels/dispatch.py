"""The one list of kernels: each operator, the module of its definition, and whether Triton has one.

Implementations are named, not imported, so that a backend's library (triton) is needed only by who uses it.
A faster kernel is one module in the backend's folder; what a backend lacks falls back to `torch`.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import torch

from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError

_INTERPRETS_NEW_NUMPY, _STRICT_NUMPY = (3, 7), (2, 4)
_HERE = "perfmodel_executors.kernels"
_OLDEST = 80  # compute capability of Ampere; on sm_75 Triton compiles matrix products without tensor cores

_Operator: TypeAlias = Callable[..., Any]


class _In(NamedTuple):
    """The module of an operator, and whether `triton/` has one of that name."""

    module: str
    has_triton: bool = True

    @property
    def modules(self) -> dict[str, str]:
        """Backend -> module."""
        known = {"torch": f"{_HERE}.{self.module}"}
        return known | {"triton": f"{_HERE}.triton.{self.module}"} if self.has_triton else known


_TORCH_ONLY = False


class Kernels:
    """The chosen implementation of every operator, as attributes: `kernels.rms_norm(x, weight, eps)`."""

    activate: Annotated[_Operator, _In("swiglu")]
    add_rms_norm: Annotated[_Operator, _In("rms_norm")]
    attention_decode: Annotated[_Operator, _In("attention_decode")]
    attention_latent_decode: Annotated[_Operator, _In("attention_latent")]
    attention_latent_prefill: Annotated[_Operator, _In("attention_latent")]
    attention_prefill: Annotated[_Operator, _In("attention_prefill")]
    attention_sinks_decode: Annotated[_Operator, _In("attention_sinks", _TORCH_ONLY)]
    attention_sinks_prefill: Annotated[_Operator, _In("attention_sinks", _TORCH_ONLY)]
    attention_softmax_decode: Annotated[_Operator, _In("attention_decode")]
    attention_softmax_prefill: Annotated[_Operator, _In("attention_prefill")]
    attention_sparse_decode: Annotated[_Operator, _In("attention_sparse")]
    attention_sparse_prefill: Annotated[_Operator, _In("attention_sparse")]
    attention_standard: Annotated[_Operator, _In("attention_standard")]
    capacity_experts: Annotated[_Operator, _In("moe", _TORCH_ONLY)]
    causal_conv_decode: Annotated[_Operator, _In("causal_conv")]
    causal_conv_prefill: Annotated[_Operator, _In("causal_conv")]
    greedy: Annotated[_Operator, _In("sampling")]
    grouped_experts: Annotated[_Operator, _In("moe")]
    kv_write: Annotated[_Operator, _In("rope_kv_write", _TORCH_ONLY)]
    linear: Annotated[_Operator, _In("linear")]
    linear_fp8: Annotated[_Operator, _In("linear")]
    linear_fp8_block: Annotated[_Operator, _In("linear")]
    linear_gguf: Annotated[_Operator, _In("linear", _TORCH_ONLY)]
    linear_signs: Annotated[_Operator, _In("linear", _TORCH_ONLY)]
    linear_sparse24: Annotated[_Operator, _In("linear", _TORCH_ONLY)]
    linear_w4a16: Annotated[_Operator, _In("linear")]
    linear_w4a8: Annotated[_Operator, _In("linear", _TORCH_ONLY)]
    linear_w8a16: Annotated[_Operator, _In("linear")]
    linear_w8a8: Annotated[_Operator, _In("linear")]
    linear_w8a8_static: Annotated[_Operator, _In("linear", _TORCH_ONLY)]
    rms_norm: Annotated[_Operator, _In("rms_norm")]
    rope: Annotated[_Operator, _In("rope_kv_write", _TORCH_ONLY)]
    rope_kv_write: Annotated[_Operator, _In("rope_kv_write")]
    route: Annotated[_Operator, _In("moe")]
    sample_top_k_top_p: Annotated[_Operator, _In("sampling")]
    scan_decode: Annotated[_Operator, _In("scan")]
    scan_prefill: Annotated[_Operator, _In("scan")]
    verify_greedy: Annotated[_Operator, _In("sampling", _TORCH_ONLY)]
    verify_stochastic: Annotated[_Operator, _In("sampling", _TORCH_ONLY)]


KERNELS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {name: hint.__metadata__[0].modules for name, hint in get_type_hints(Kernels, include_extras=True).items()}
)


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
            "the triton kernels need triton, which is not installed: pip install '.[executor]' in the checkout, or use "
            "the torch kernels (--kernels torch)."
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
