"""Index tensors of a step: many small ones, sent to the device in one copy.

Each begins at a multiple of 16 bytes, as an allocation of its own would: Triton compiles a kernel again for a pointer
that does not.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IndexArray: TypeAlias = NDArray[np.int64]

_PER_UNIT = 2  # int64 in 16 bytes


def on_device(device: torch.device, **values: IndexArray | Sequence[int] | None) -> dict[str, Any]:
    """int64 tensors by the names of `values`, in their shapes; None stays None."""
    arrays = {name: np.asarray(each, dtype=np.int64) for name, each in values.items() if each is not None}
    begins = list(accumulate((-(-each.size // _PER_UNIT) * _PER_UNIT for each in arrays.values()), initial=0))
    flat = np.zeros(begins[-1] + _PER_UNIT, dtype=np.int64)  # an empty last one begins somewhere, too
    for begin, each in zip(begins, arrays.values(), strict=False):
        flat[begin : begin + each.size] = each.ravel()
    sent = torch.from_numpy(flat).to(device)
    tensors: dict[str, Tensor | None] = dict.fromkeys(values)
    for begin, (name, each) in zip(begins, arrays.items(), strict=False):
        tensors[name] = sent[begin : begin + each.size].view(each.shape)
    return tensors
