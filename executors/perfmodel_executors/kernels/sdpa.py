"""torch's scaled_dot_product_attention by each of its backends: what kernels of attention are compared with.

Left to itself it takes the first backend that its heuristics allow, which need not be the fastest, and does not say
which. A backend that does not take a call raises RuntimeError.
"""

__all__ = ["by_backend"]

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


def by_backend(attend: Callable[..., Tensor]) -> Mapping[str, Callable[..., Tensor]]:
    """`attend`, which calls SDPA, by each backend alone."""
    return {f"sdpa {name}": partial(_forced, backend, attend) for name, backend in _BACKENDS.items()}


def _forced(backend: SDPBackend, attend: Callable[..., Tensor], *args: object) -> Tensor:
    with sdpa_kernel(backend):
        return attend(*args)
