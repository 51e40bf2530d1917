"""Devices of recorded figures: those that a file or an alias names, else as a `devices.csv` describes them."""

__all__ = ["DeviceTable"]

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perfmodel.errors import SpecError
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware

# The words after the number of compute units: whose they are.
_MAKERS = (("SM", "nvidia"), ("CU", "amd"), ("Xe", "intel"), ("GPU cores", "apple"), ("MME", "intel"))
_COUNT = re.compile(r"\d+")
_PEAKS = {  # column -> rate; FLOP/s in units of 1e12
    "fp32_tflops": "fp32",
    "fp16_tensor_fp32_accumulate_tflops": "fp16",
    "fp16_tensor_dense_tflops": "fp16_acc16",
    "int8_dense_tops": "int8",
}
# A table's words for what a CPU computes with -> instructions.
_SIMD = {
    "avx512": ("avx512", "avx2"),
    "amx": ("amx",),
    "amx/sme": ("sme",),
    "avx2": ("avx2",),
    "avx": ("avx",),
    "sse4": ("sse4",),
    "sse4a": ("sse4",),
    "neon": ("neon",),
    "rvv1.0-256": ("rvv",),
}
_DEFAULT_BYTES = 64e9  # of memory that a table leaves open: figures do not depend on it
_VECTOR_OPS = 8.0  # FLOPs per core and clock, where a table has no rate: four lanes that multiply and add


class DeviceTable:
    """Looks devices up by the names that figures have for them."""

    def __init__(self, folder: Path) -> None:
        file = folder / "devices.csv"
        self._rows = _read(file) if file.is_file() else {}
        self._found: dict[tuple[str, str], HardwareSpec] = {}

    def device(self, name: str, device_class: str) -> HardwareSpec:
        """The device called `name`. Raises SpecError where neither a file nor the table has it."""
        key = name, device_class
        if key not in self._found:
            self._found[key] = self._look_up(name, device_class)
        return self._found[key]

    def facts(self, name: str) -> Mapping[str, str]:
        """What the table says of a device; nothing where it is not in it."""
        return self._rows.get(name, {})

    def _look_up(self, name: str, device_class: str) -> HardwareSpec:
        kind = "cpu" if device_class == "cpu" else "gpu"
        try:
            listed = load_hardware(name)
            if listed.kind == kind:
                return listed
        except SpecError:
            pass
        if name not in self._rows:
            raise SpecError(f"{name}: no file or alias names this device, and devices.csv has no row for it.")
        return _hardware(name, kind, self._rows[name])


def _read(file: Path) -> dict[str, dict[str, str]]:
    try:
        with file.open(encoding="utf-8") as stream:
            return {row["device"]: {k: v or "" for k, v in row.items() if k} for row in csv.DictReader(stream)}
    except (OSError, UnicodeDecodeError, csv.Error, KeyError) as error:
        raise SpecError(f"{file}: cannot be read as a table of devices ({error}).") from None


def _hardware(name: str, kind: str, row: Mapping[str, str]) -> HardwareSpec:
    cores, clock_hz = row.get("cores", ""), 1e6 * _number(row, "boost_mhz")
    count = _COUNT.match(cores)
    units = int(count[0]) if count else 1
    peaks = {rate: 1e12 * _number(row, column) for column, rate in _PEAKS.items() if _number(row, column)}
    if not peaks and clock_hz:
        peaks = {"fp32": units * clock_hz * _VECTOR_OPS}
    memory: list[dict[str, Any]] = [
        {
            "level": "hbm",
            "capacity_bytes": 1e9 * _number(row, "memory_gb") or _DEFAULT_BYTES,
            "bandwidth_bytes_per_s": 1e9 * _number(row, "memory_bandwidth_gb_s"),
        }
    ]
    if _number(row, "last_level_cache_mb"):
        memory.append({"level": "l2", "capacity_bytes": 1e6 * _number(row, "last_level_cache_mb")})
    simd = [each for word in row.get("simd", "").split("+") for each in _SIMD.get(word, ())]
    declared = {
        "source": f"devices.csv: {row.get('source') or 'no source'}",
        "compute_units": units,
        "clock_hz": clock_hz or 1e9,
        "peak_flops_per_s": peaks,
        "memory": memory,
        "tdp_w": _number(row, "tdp_w") or None,
        "instructions": simd,
    }
    maker = next((maker for word, maker in _MAKERS if word in cores), None)
    if "fp32" in peaks:
        declared["vector_flops_per_s"] = peaks["fp32"]
    try:
        file_name = re.sub(r"[^\w.+-]+", "-", name).strip("-")
        return HardwareSpec.model_validate(
            {"name": file_name, "kind": kind, "maker": None if kind == "cpu" else maker, "declared": declared}
        )
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise SpecError(f"{name}: devices.csv has too little to go by ({where}).") from None


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        return float(row.get(column) or 0.0)
    except ValueError:
        return 0.0
