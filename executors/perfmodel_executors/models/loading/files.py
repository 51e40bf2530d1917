"""The tensors of a .gguf file or of .safetensors files by our names, in the layout that we compute with. GGUF: the rows
of q and k of the `llama` architecture lie in pairs (elements 2i and 2i + 1 of a head rotate together) and are put back
into halves. `Reader`: a model's tensors, of known shapes, on the device and in the dtype of the decoder."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfmodel.errors import MissingExtraError, SpecError
from perfmodel.models.spec import ModelSpec
from perfmodel.models.weights.headers import weight_files
from perfmodel_executors.kernels.gguf_blocks import BLOCK_SIZES
from perfmodel_executors.kernels.stored_rows import reordered
from perfmodel_executors.kernels.weight_formats import FP8_BLOCK, BlockFp8Weight, GgufWeight, MatrixWeight, dequantize
from perfmodel_executors.models.loading.names import NAMES

_PLAIN = ("f32", "f16", "bf16")


class GgufFile:
    """`is_paired`: rows of q and k lie in pairs. Both kinds of files have `has` (whether the tensor `name`, a key of
    NAMES, of a layer is there), `get`, and `matrix`, as it is stored where we multiply by that format; they raise
    SpecError for a tensor that is not there, or cannot be read."""

    def __init__(self, path: Path, is_paired: bool) -> None:
        _need("gguf", path)
        from gguf import GGUFReader

        self._path, self._is_paired = path, is_paired
        try:
            self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise SpecError(f"{path}: the weights cannot be read ({error}); is the file whole?") from None

    def has(self, name: str, layer: int = 0, kind: str = "weight") -> bool:
        return f"{NAMES[name].gguf.format(layer)}.{kind}" in self._tensors

    def get(self, name: str, layer: int = 0, kind: str = "weight", num_heads: int = 1, expert: int = 0) -> Tensor:
        from gguf import dequantize

        full, entry = self._entry(name, layer, kind)
        try:
            values = np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise SpecError(f"{self._path}: {full} is in {entry.tensor_type.name}, which gguf cannot read.") from None
        tensor = torch.from_numpy(values)
        return _halves(tensor, num_heads) if self._is_paired and name in ("q", "k") else tensor

    def matrix(self, name: str, layer: int = 0, num_heads: int = 1, expert: int = 0) -> MatrixWeight:
        full, entry = self._entry(name, layer, "weight")
        form = entry.tensor_type.name.lower()
        if form in _PLAIN:
            return self.get(name, layer, num_heads=num_heads)
        if form not in BLOCK_SIZES:
            raise SpecError(
                f"{self._path}: {full} is in {form}, and products are executed in {', '.join(BLOCK_SIZES)}; set "
                f"engine.quantization to none, which dequantises the weights when they are loaded."
            )
        blocks = GgufWeight(torch.from_numpy(np.array(entry.data, dtype=np.uint8)), form)
        if self._is_paired and name in ("q", "k"):
            return reordered(blocks, lambda rows: _halves(rows, num_heads))
        return blocks

    def _entry(self, name: str, layer: int, kind: str) -> tuple[str, Any]:
        full = f"{NAMES[name].gguf.format(layer)}.{kind}"
        entry = self._tensors.get(full)
        if entry is None:
            raise SpecError(f"{self._path}: no tensor {full}.")
        return full, entry


class SafetensorsFiles:
    """One file, or all that an index or a numbered file belongs to."""

    def __init__(self, path: Path) -> None:
        _need("safetensors", path)
        from safetensors import SafetensorError, safe_open

        self._path = path
        self._files: dict[str, Any] = {}
        for file in weight_files(path):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise SpecError(f"{file}: the weights cannot be read ({error}); is the file whole?") from None
            self._files |= dict.fromkeys(opened.keys(), opened)
        # Multimodal files and bare decoders put other words before a decoder's own names.
        words = (NAMES["embedding"].hugging_face, *NAMES["embedding"].also)
        endings = tuple(f"{word}.weight" for word in words)
        table = next((full for full in self._files if full.endswith(endings)), None)
        self._prefix = "model." if table is None else table[: table.rindex("embed")]

    def has(self, name: str, layer: int = 0, kind: str = "weight") -> bool:
        return any(full in self._files for full in self._names(name, layer, kind, 0))

    def get(self, name: str, layer: int = 0, kind: str = "weight", num_heads: int = 1, expert: int = 0) -> Tensor:
        stored = self._stored(name, layer, kind, expert)
        return stored if isinstance(stored, Tensor) else dequantize(stored)

    def matrix(self, name: str, layer: int = 0, num_heads: int = 1, expert: int = 0) -> MatrixWeight:
        return self._stored(name, layer, "weight", expert)

    def _stored(self, name: str, layer: int, kind: str, expert: int) -> Tensor | BlockFp8Weight:
        names = self._names(name, layer, kind, expert)
        full = next((name for name in names if name in self._files), None)
        if full is None:
            raise SpecError(f"{self._path}: no tensor {names[-1]}.")
        tensor: Tensor = self._files[full].get_tensor(full)
        scales = f"{full}_scale_inv"
        if tensor.dtype != torch.float8_e4m3fn or scales not in self._files:
            return tensor
        blocks = BlockFp8Weight(tensor, self._files[scales].get_tensor(scales).float())
        wanted = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
        if blocks.scales_RG.shape != wanted:
            raise SpecError(
                f"{self._path}: {scales} has the shape {tuple(blocks.scales_RG.shape)}, but a weight of "
                f"{tuple(tensor.shape)} in blocks of {FP8_BLOCK} x {FP8_BLOCK} has {wanted}."
            )
        return blocks

    def _names(self, name: str, layer: int, kind: str, expert: int) -> list[str]:
        """What it may be called, its commonest name last."""
        prefix = "" if name == "lm_head" else self._prefix
        known = (*NAMES[name].also, NAMES[name].hugging_face)
        return [f"{prefix}{pattern.format(layer, expert=expert)}.{kind}" for pattern in known]


def _need(package: str, path: Path) -> None:
    if find_spec(package) is None:
        raise MissingExtraError(
            f"reading the weights of {path.name} needs {package}, which is not installed: pip install "
            f"'.[weights]' in the checkout; or execute its config.json, with random weights."
        )


def _halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of heads from (0, 1), (2, 3), ... pairs to (0, H/2), (1, H/2 + 1), ... ones."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


class Reader:
    """Reads the file at `path` for `model`; nothing is read before it is asked for. keeps_format: matrices in blocks
    stay in them; else they are dequantised. Raises MissingExtraError without the package that reads the format,
    SpecError for a damaged file."""

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, model: ModelSpec, keeps_format: bool = False
    ) -> None:
        self.model, self._keeps_format = model, keeps_format
        self._file: GgufFile | SafetensorsFiles
        if path.suffix == ".gguf":
            self._file = GgufFile(path, is_paired=model.model_type == "llama")
        else:
            self._file = SafetensorsFiles(path)
        self._path, self._dtype, self._device = path, dtype, device

    def has(self, name: str, layer: int, kind: str = "weight") -> bool:
        return self._file.has(name, layer, kind)

    def tensor(
        self, name: str, *shape: int, layer: int = 0, kind: str = "weight", num_heads: int = 1, expert: int = 0
    ) -> Tensor:
        """The tensor `name`, a key of NAMES, of this shape, in the dtype of the decoder. kind: what follows the name in
        the file; num_heads: that share rows of q and k; expert: where experts have tensors of their own. Raises
        SpecError for a missing one, or another shape."""
        return self.placed(self.raw(name, *shape, layer=layer, kind=kind, num_heads=num_heads, expert=expert))

    def matrix(self, name: str, *shape: int, layer: int = 0, num_heads: int = 1, expert: int = 0) -> MatrixWeight:
        """The weight of a linear layer as the file stores it, if formats are kept; the arguments of `tensor`."""
        if not self._keeps_format:
            return self.tensor(name, *shape, layer=layer, num_heads=num_heads, expert=expert)
        stored = self._file.matrix(name, layer, num_heads, expert)
        self._check_shape(stored.shape, shape, name, "weight", layer)
        if isinstance(stored, GgufWeight):
            return GgufWeight(self.moved(stored.blocks_NJ), stored.form)
        if isinstance(stored, BlockFp8Weight):
            return BlockFp8Weight(self.moved(stored.values_NK), self.moved(stored.scales_RG))
        assert isinstance(stored, Tensor)
        return self.placed(stored)

    def raw(
        self, name: str, *shape: int, layer: int = 0, kind: str = "weight", num_heads: int = 1, expert: int = 0
    ) -> Tensor:
        stored = self._file.get(name, layer, kind, num_heads, expert)
        self._check_shape(stored.shape, shape, name, kind, layer)
        return stored

    def _check_shape(self, shape: tuple[int, ...], wanted: tuple[int, ...], name: str, kind: str, layer: int) -> None:
        if shape != wanted:
            raise SpecError(
                f"{self._path}: {name} {kind} of layer {layer} has the shape {tuple(shape)}, but the model's is "
                f"{wanted}."
            )

    def norm(self, name: str, layer: int, *shape: int) -> Tensor:
        """The weights of a norm, with what the model adds to those in its file."""
        stored, offset = self.raw(name, *shape, layer=layer), self.model.norm_offset
        return self.placed(stored.float() + offset if offset else stored)

    def moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)
