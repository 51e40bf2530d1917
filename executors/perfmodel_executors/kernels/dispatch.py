"""The one list of kernels: each operator, the module of its definition, and whether Triton has one. Implementations are
named, not imported, so that a backend's library (triton) is needed only by who uses it."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError

_INTERPRETS_NEW_NUMPY, _STRICT_NUMPY = (3, 7), (2, 4)
_HERE = "perfmodel_executors.kernels"
_OLDEST = 80  # compute capability of Ampere; on sm_75 Triton compiles matrix products without tensor cores

# Module -> its operators that `triton/` has, too, and those that torch alone has.
_MODULES: Mapping[str, tuple[str, str]] = {
    "attention_decode": ("attention_decode attention_softmax_decode", ""),
    "attention_latent": ("attention_latent_decode attention_latent_prefill", ""),
    "attention_prefill": ("attention_prefill attention_softmax_prefill", ""),
    "attention_sinks": ("attention_sinks_decode attention_sinks_prefill", ""),
    "attention_sparse": ("attention_sparse_decode attention_sparse_prefill", ""),
    "attention_standard": ("attention_standard", ""),
    "causal_conv": ("causal_conv_decode causal_conv_prefill", ""),
    "linear": (
        "linear linear_fp8 linear_fp8_block linear_w4a16 linear_w8a16 linear_w8a8 linear_w8a8_static",
        "linear_gguf linear_signs linear_sparse24 linear_w4a8",
    ),
    "moe": ("capacity_experts grouped_experts route", ""),
    "rms_norm": ("add_rms_norm rms_norm", ""),
    "rope_kv_write": ("kv_write rope rope_kv_write", ""),
    "sampling": ("greedy sample_top_k_top_p verify_greedy", ""),
    "scan": ("scan_decode scan_prefill", ""),
    "swiglu": ("activate", ""),
}

# Operator -> backend -> module.
KERNELS: Mapping[str, Mapping[str, str]] = {
    operator: {"torch": f"{_HERE}.{module}"} | ({"triton": f"{_HERE}.triton.{module}"} if has_triton else {})
    for operator, module, has_triton in sorted(
        (operator, module, has_triton)
        for module, columns in _MODULES.items()
        for operators, has_triton in zip(columns, (True, False), strict=True)
        for operator in operators.split()
    )
}


class Kernels:
    """The chosen implementation of every operator, as attributes: `kernels.rms_norm(x, weight, eps)`. substituted:
    operators that ran in torch so far, since the chosen backend has none"""

    def __init__(self, implementations: Mapping[str, Callable[..., Any]], missing: Iterable[str] = ()) -> None:
        self.substituted: set[str] = set()
        vars(self).update(implementations)
        for operator in missing:
            vars(self)[operator] = partial(self._substitute, operator, implementations[operator])

    def _substitute(self, operator: str, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.substituted.add(operator)
        return run(*arguments, **named)

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        raise AttributeError(f"there is no operator {operator!r}")


def load_kernels(backend: str = "torch", device: torch.device | None = None) -> Kernels:
    """The implementations of `backend`, with torch's where it has none; for `device`, if it is known already. Raises
    PerfmodelError for an unknown backend, one whose library is not installed, or a device it does not run on."""
    known = sorted({name for row in KERNELS.values() for name in row})
    if backend not in known:
        raise PerfmodelError(f"there are no {backend!r} kernels; known backends: {', '.join(known)}.")
    if backend == "triton":
        if find_spec("triton") is None:
            raise MissingExtraError(
                "the triton kernels need triton, which is not installed: pip install '.[executor]' in the checkout, or "
                "use the torch kernels (--kernels torch)."
            )
        if os.environ.get("TRITON_INTERPRET") == "1":
            check_interpreter(version("triton"), version("numpy"))
        if device is not None and device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            check_capability(torch.cuda.get_device_name(device), 10 * major + minor)
    modules = {operator: import_module(row.get(backend, row["torch"])) for operator, row in KERNELS.items()}
    missing = [operator for operator, row in KERNELS.items() if backend not in row]
    return Kernels({operator: getattr(module, operator) for operator, module in modules.items()}, missing)


def check_capability(device: str, capability: int) -> None:
    """Raises SpecError for a CUDA device without the tensor cores that Triton uses; capability: 80 for sm_80."""
    if capability < _OLDEST:
        raise SpecError(
            f"{device} is sm_{capability}, and Triton kernels need sm_{_OLDEST} or newer (older tensor cores are not "
            f"used and every product spills); use the torch kernels (--kernels torch)."
        )


def check_interpreter(triton: str, numpy: str) -> None:
    """Raises MissingExtraError where Triton before 3.7 meets NumPy 2.4, which makes no integers of arrays."""
    first_two = [tuple(int(part) for part in name.split(".")[:2]) for name in (triton, numpy)]
    if first_two[0] < _INTERPRETS_NEW_NUMPY and first_two[1] >= _STRICT_NUMPY:
        raise MissingExtraError(
            f"triton {triton} does not interpret kernels with numpy {numpy}, which makes no integers of arrays: "
            f"pip install 'numpy<2.4', or triton 3.7, or unset TRITON_INTERPRET."
        )
