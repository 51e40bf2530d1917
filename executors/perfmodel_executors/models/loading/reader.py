"""`Reader`: a model's tensors by name, of known shapes, on the device and in the dtype of the decoder."""

__all__ = ["Reader"]

from pathlib import Path

import torch
from torch import Tensor

from perfmodel.errors import SpecError
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels.weight_formats import BlockFp8Weight, GgufWeight, MatrixWeight
from perfmodel_executors.models.loading.files import TensorFile


class Reader:
    """Reads `file`, which is at `path`, for `model`.

    keeps_format: matrices in blocks stay in them; else they are dequantised
    """

    def __init__(
        self,
        file: TensorFile,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        model: ModelSpec,
        keeps_format: bool = False,
    ) -> None:
        self.model = model
        self._keeps_format = keeps_format
        self._file = file
        self._path = path
        self._dtype = dtype
        self._device = device

    def has(self, name: str, layer: int, kind: str = "weight") -> bool:
        """Whether the file has the tensor."""
        return self._file.has(name, layer, kind)

    def tensor(
        self, name: str, *shape: int, layer: int = 0, kind: str = "weight", num_heads: int = 1, expert: int = 0
    ) -> Tensor:
        """The tensor `name`, a key of NAMES.

        shape:     what it must be
        layer:     its number
        kind:      what follows the name in the file
        num_heads: that share the rows of q and k
        expert:    its number, where experts have tensors of their own

        Raises SpecError for a tensor that is not there, or has another shape.
        """
        return self.raw(name, *shape, layer=layer, kind=kind, num_heads=num_heads, expert=expert).to(
            self._device, self._dtype
        )

    def matrix(self, name: str, *shape: int, layer: int = 0, num_heads: int = 1, expert: int = 0) -> MatrixWeight:
        """The weight of a linear layer as the file stores it, if formats are kept; the arguments of `tensor`."""
        if not self._keeps_format:
            return self.tensor(name, *shape, layer=layer, num_heads=num_heads, expert=expert)
        found = self._file.matrix(name, layer, num_heads, expert)
        self._check_shape(found.shape, shape, name, "weight", layer)
        if isinstance(found, GgufWeight):
            return GgufWeight(self.moved(found.blocks_NJ), found.form)
        if isinstance(found, BlockFp8Weight):
            return BlockFp8Weight(self.moved(found.values_NK), self.moved(found.scales_RG))
        assert isinstance(found, Tensor)
        return self.placed(found)

    def raw(
        self, name: str, *shape: int, layer: int = 0, kind: str = "weight", num_heads: int = 1, expert: int = 0
    ) -> Tensor:
        """The same as the file has it."""
        found = self._file.get(name, layer, kind, num_heads, expert)
        self._check_shape(found.shape, shape, name, kind, layer)
        return found

    def _check_shape(self, found: tuple[int, ...], wanted: tuple[int, ...], name: str, kind: str, layer: int) -> None:
        if found != wanted:
            raise SpecError(
                f"{self._path}: {name} {kind} of layer {layer} has the shape {tuple(found)}, but the model's is "
                f"{wanted}."
            )

    def norm(self, name: str, layer: int, *shape: int) -> Tensor:
        """The weights of a norm, with what the model adds to those in its file."""
        found = self.raw(name, *shape, layer=layer)
        offset = self.model.norm_offset
        return (found.float() + offset if offset else found).to(self._device, self._dtype)

    def moved(self, tensor: Tensor) -> Tensor:
        """A raw tensor on the device, in its own dtype."""
        return tensor.to(self._device)

    def placed(self, tensor: Tensor) -> Tensor:
        """A tensor that was made of raw ones."""
        return tensor.to(self._device, self._dtype)
