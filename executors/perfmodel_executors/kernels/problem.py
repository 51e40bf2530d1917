"""Problems of operators: calls with their inputs, for tests, ahead-of-time compilation and measurement alike. The
module of an operator has two lists of them: `tiny(dtype)`, odd sizes that an interpreter gets through, and `serving()`,
the sizes that matter on a GPU. A problem makes its inputs on any device; on `meta` they have no memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfmodel.ops.work import Work
from perfmodel_executors.kernels.dispatch import KERNELS

Sizes = Mapping[str, int | float | str]


class Inputs:
    def __init__(self, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.device = torch.device(device)
        self._generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device)
        return values.mul_(scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def permutation(self, size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randperm(size, generator=self._generator, device=self.device).to(dtype)

    def of(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Problem:
    """One call of an operator. sizes: by the names that tables of measured kernels use; make: equal arguments of equal
    seeds; work: as the cost model counts it, None where nothing is measured; tolerance: largest |difference| as a share
    of the reference's largest magnitude; baselines: library calls for the same arguments, by name."""

    operator: str
    sizes: Sizes
    make: Callable[[Inputs], tuple[Any, ...]] = field(repr=False)
    work: Work | None = field(default=None, repr=False)
    tolerance: float = 1e-5
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"{self.operator} " + " ".join(f"{name}={value}" for name, value in self.sizes.items())


def problems_of(operator: str, kind: str = "serving", dtype: torch.dtype | None = None) -> list[Problem]:
    """The operator's problems: `serving`, or `tiny` ones of a dtype; empty where its module lists none."""
    module = import_module(KERNELS[operator]["torch"])
    if not hasattr(module, "tiny"):
        return []
    listed: list[Problem] = module.serving() if kind == "serving" else module.tiny(dtype or torch.float32)
    return [problem for problem in listed if problem.operator == operator]


def by_backend(attend: Callable[..., Tensor]) -> Mapping[str, Callable[..., Tensor]]:
    """`attend`, which calls SDPA, by each backend alone, which raises RuntimeError where it does not take a call. Left
    to itself SDPA takes the first one that its heuristics allow, which need not be the fastest."""

    def forced(backend: SDPBackend, *args: object) -> Tensor:
        with sdpa_kernel(backend):
            return attend(*args)

    backends = {name: getattr(SDPBackend, f"{name.upper()}_ATTENTION") for name in ("cudnn", "efficient", "flash")}
    return {f"sdpa {name}": partial(forced, backend) for name, backend in backends.items()}
