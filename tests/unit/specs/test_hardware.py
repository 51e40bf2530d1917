"""The hardware files: each loads, cites its source, and says what everyone can look up."""

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.device_tables import table_rows
from perfmodel.specs import list_names, load_hardware
from perfmodel.specs.devices import find_device, read_device
from perfmodel.specs.hardware import HardwareSpec, MemoryLevel

# Device of hardware_facts.csv -> our name, where an alias does not already say so.
_FACTS_NAMES = {
    "RTX PRO 6000 Blackwell Server": "rtx-pro-6000",
    "EPYC 9654 (96c Zen4)": "epyc-9654",
    "Xeon Platinum 8480+ (56c SPR)": "xeon-8480",
    "Jetson AGX Orin 64GB (validation-only)": "jetson-agx-orin",
}
_FACTS_COLUMNS = {
    "tf32_tflops": ("tf32", 1e12),
    "bf16_tflops_dense": ("bf16", 1e12),
    "fp8_tflops_dense": ("fp8", 1e12),
    "int8_tops_dense": ("int8", 1e12),
    "int4_tops_dense": ("int4", 1e12),
    "fp4_tflops_dense": ("fp4", 1e12),
}


# Files of devices by name, and tables with the names of their rows.
_FILES: dict[str, list[str]] = {name: [name] for name in list_names("hardware")}
for _row in table_rows():
    _FILES.setdefault(f"table {_row.file.stem}", []).append(_row.name)


@pytest.mark.release
@pytest.mark.parametrize("file", _FILES)
def test_each_file_loads_and_is_plausible(file: str) -> None:
    for name in _FILES[file]:
        is_plausible(name)


def units_of(level: MemoryLevel, hardware: HardwareSpec) -> int:
    return hardware.declared.compute_units if level.per == "compute_unit" else 1


def is_plausible(name: str) -> None:
    hardware = load_hardware(name)
    declared = hardware.declared
    assert hardware.name == name
    assert len(declared.source) > 10
    assert declared.architecture
    assert declared.memory[0].level == "hbm"
    assert hardware.level("sram") is not None
    assert "fp32" in declared.peak_flops_per_s
    assert {"bf16", "fp16"} & set(declared.peak_flops_per_s) or hardware.kind == "cpu"
    assert hardware.kind != "gpu" or declared.vector_flops_per_s is not None
    assert 1 < ridge(name) < 2000
    seen = hardware.visible_memory_bytes / hardware.memory_bytes
    assert 0.9 < seen < 1.1 or (declared.memory[0].unified and 0.4 < seen <= 1)
    known = [(level.bandwidth_bytes_per_s or 0) * units_of(level, hardware) for level in declared.memory]
    known = [bandwidth for bandwidth in known if bandwidth]
    assert known == sorted(known), "inner levels are faster"
    assert all(link.latency_s < 1e-4 for link in declared.links)


@pytest.mark.parametrize("file", _FILES)
def test_what_is_unconfirmed_exists(file: str) -> None:
    for name in _FILES[file]:
        its_unconfirmed_exist(name)


def its_unconfirmed_exist(name: str) -> None:
    data: Any = read_device(find_device(name)).data["declared"]
    for path in data.get("unconfirmed", ()):
        block = data
        for part in path.split("."):
            if isinstance(block, list):
                block = next(item for item in block if part in (item.get("level"), item.get("name")))
            else:
                block = block[part]


def ridge(name: str) -> float:
    """FLOP per byte at which the fastest of bf16, fp16 and fp32 turns from memory-bound to compute-bound."""
    hardware = load_hardware(name)
    peaks = hardware.declared.peak_flops_per_s
    return max(peaks.get(dtype, 0.0) for dtype in ("bf16", "fp16", "fp32")) / hardware.memory_bandwidth


@pytest.mark.parametrize(
    ("name", "flop_per_byte"),
    [("a100-sxm-80gb", 153), ("h100-sxm-80gb", 295), ("a10", 208.3), ("tpu-v5e", 240), ("h200-sxm", 206)],
)
def test_ridge_points_that_are_published(name: str, flop_per_byte: float) -> None:
    """312e12 / 2039e9 = 153.0; 989e12 / 3350e9 = 295.2; Baseten: A10 208.3; scaling-book: v5e 240."""
    assert ridge(name) == pytest.approx(flop_per_byte, rel=0.005)


def test_per_unit_levels_add_up_over_the_device() -> None:
    a100 = load_hardware("a100-sxm-80gb")
    sram, l2, registers = (a100.level(name) for name in ("sram", "l2", "registers"))
    assert sram is not None
    assert l2 is not None
    assert registers is not None
    assert units_of(sram, a100) * sram.capacity_bytes == 108 * 164 * 1024
    assert units_of(sram, a100) * (sram.bandwidth_bytes_per_s or 0) == pytest.approx(108 * 128 * 1.41e9)
    assert units_of(l2, a100) * l2.capacity_bytes == 40 * 2**20
    assert registers.bandwidth_bytes_per_s is None
    assert a100.level("tensor_memory") is None


def test_scale_up_links() -> None:
    names = {
        "a100-sxm-80gb": "nvlink",
        "l40s": "pcie",
        "mi300x": "infinity_fabric",
        "tpu-v5e": "ici",
        "gaudi-3": "ethernet",
    }
    for name, link in names.items():
        found = load_hardware(name).scale_up_link
        assert found is not None
        assert found.name == link
    assert load_hardware("cpu").scale_up_link is None


def first_number(text: str) -> float | None:
    match = re.search(r"\d+(?:\.\d+)?", text)
    return float(match[0]) if match else None


def test_the_files_agree_with_the_collected_facts(shared: Path) -> None:
    with (shared / "truth" / "hardware_facts.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] != "note"]
    compared, wrong = 0, []
    for row in rows:
        hardware = load_hardware(_FACTS_NAMES.get(row["device"], row["device"].split(" (")[0]))
        declared, peaks = hardware.declared, hardware.declared.peak_flops_per_s
        pairs: list[tuple[str, float | None, float | None]] = [
            ("memory", first_number(row["mem_gb"]), hardware.memory_bytes / 1e9),
            ("bandwidth", first_number(row["mem_bw_gbs"].lstrip("~")), hardware.memory_bandwidth / 1e9),
            ("tdp_w", first_number(row["tdp_w"].lstrip("~")), declared.tdp_w),
        ]
        if hardware.kind == "gpu":
            pairs.append(("compute_units", first_number(row["sm_or_cu"]), declared.compute_units))
            pairs.append(("clock", first_number(row["clock_mhz"]), declared.clock_hz / 1e6))
        for column, (key, factor) in _FACTS_COLUMNS.items():
            peak = peaks.get(key) or (peaks.get("fp16") if key == "bf16" else None)
            pairs.append((key, first_number(row[column].lstrip("~")), peak / factor if peak else None))
        for field, fact, ours in pairs:
            if fact is None or ours is None or (hardware.kind == "cpu" and field == "memory"):
                continue
            compared += 1
            if not math.isclose(fact, ours, rel_tol=0.01):
                wrong.append(f"{hardware.name}: {field}: facts {fact}, file {ours}")
    # The A10G board's 150 W is the A10's; an AWS g5 runs it at 300 W, as the same row says.
    assert wrong == ["a10g: tdp_w: facts 150.0, file 300.0"]
    assert compared > 200


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hardware.hbm.bandwidth=2x", ("memory_bandwidth", 2 * 2039e9)),
        ("hardware.hbm.bandwidth=3 TB/s", ("memory_bandwidth", 3e12)),
        ("hardware.declared.memory.0.bandwidth_bytes_per_s=0.5x", ("memory_bandwidth", 2039e9 / 2)),
        ("hardware.declared.memory.hbm.bandwidth_bytes_per_s=1e12", ("memory_bandwidth", 1e12)),
        ("hardware.memory.hbm.bandwidth=2x", ("memory_bandwidth", 2 * 2039e9)),
        ("hardware.declared.memory.hbm.bandwidth_bytes_per_s=2x", ("memory_bandwidth", 2 * 2039e9)),
        ("hardware.hbm.capacity=160 GB", ("memory_bytes", 160e9)),
        ("hardware.hbm.capacity=2x", ("visible_memory_bytes", 160e9)),
    ],
)
def test_short_names_change_the_hardware(override: str, expected: tuple[str, float]) -> None:
    hardware = load_hardware("a100-sxm-80gb", [override])
    assert getattr(hardware, expected[0]) == pytest.approx(expected[1])


def test_short_names_reach_every_block() -> None:
    changes = [
        "bf16=2x",
        "nvlink.bandwidth=900 GB/s",
        "nvlink.latency=2 us",
        "l2.capacity=2x",
        "clock=0.5x",
        "price=1.5",
    ]
    hardware = load_hardware("a100-sxm-80gb", [f"hardware.{change}" for change in changes])
    assert hardware.declared.peak_flops_per_s["bf16"] == 624e12
    nvlink = hardware.link("nvlink")
    assert nvlink is not None
    assert (nvlink.bandwidth_bytes_per_s, nvlink.latency_s) == (900e9, 2e-6)
    l2 = hardware.level("l2")
    assert l2 is not None
    assert l2.capacity_bytes == 80 * 2**20
    assert hardware.declared.clock_hz == 0.705e9
    assert hardware.price is not None
    assert hardware.price.usd_per_hour == 1.5


def test_all_rates_are_multiplied_at_once() -> None:
    base = load_hardware("h100-sxm-80gb").declared
    fast = load_hardware("h100-sxm-80gb", ["hardware.peak_flops=2x"]).declared
    assert dict(fast.peak_flops_per_s) == {name: 2 * rate for name, rate in base.peak_flops_per_s.items()}
    assert fast.vector_flops_per_s == (2 * base.vector_flops_per_s if base.vector_flops_per_s else None)


def test_links_and_rates_have_their_blocks_names() -> None:
    changes = ["hardware.links.nvlink.bandwidth=0.5x", "hardware.peak_flops.bf16=1e15"]
    hardware = load_hardware("a100-sxm-80gb", changes)
    nvlink = hardware.link("nvlink")
    assert nvlink is not None
    assert nvlink.bandwidth_bytes_per_s == 150e9
    assert hardware.declared.peak_flops_per_s["bf16"] == 1e15


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("hardware.hbn.bandwidth=2x", "hardware.hbn: unknown field. Did you mean 'hbm'?"),
        ("hardware.hbm=2x", "hardware.hbm needs a field: bandwidth, capacity, visible."),
        ("hardware.hbm.bandwith=2", "unknown field. Did you mean 'bandwidth' or 'bandwidth_bytes_per_s'?"),
        ("hardware.declared.memory.9.x=3", "declared.memory is a list of 4; 9 is not a position in it"),
        ("hardware.declared.source=2x", "got 'NVIDIA A100 datasheet"),
        ("hardware.links.nvlnk.bandwidth=2x", "hardware.links.nvlnk: unknown. Did you mean 'nvlink'?"),
        ("hardware.peak_flops.bf61=2x", "hardware.peak_flops_per_s.bf61: unknown. Did you mean 'bf16'"),
        ("hardware.links.nvlink.bandwith=2", "unknown key 'bandwith'. Did you mean 'bandwidth_bytes_per_s'?"),
        ("hardware.tf64=2x", "hardware.tf64: unknown field. Did you mean 'tf32'"),
        ("engine.block_size=2", "only fields of hardware can be set here"),
    ],
)
def test_a_wrong_override_says_so(override: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_hardware("a100-sxm-80gb", [override])
    assert str(caught.value).startswith(f"--set {override}: ")
    assert says in str(caught.value)


def test_a_device_that_idles_above_its_tdp_is_refused() -> None:
    """Its computing would give energy back."""
    with pytest.raises(SpecError, match="got idle_w 1000 above tdp_w 400"):
        load_hardware("a100-sxm-80gb", ["hardware.idle=1000"])


def test_inline_ecc_takes_a_seventeenth_of_the_bandwidth() -> None:
    """L4: 300 GB/s of GDDR6 with inline ECC, one byte of check bits per 16 bytes of data; HBM stores them
    separately."""
    assert load_hardware("l4").data_bandwidth == pytest.approx(300e9 * 16 / 17)
    for name in ("h100-sxm-80gb", "rtx-4090"):
        assert load_hardware(name).data_bandwidth == load_hardware(name).memory_bandwidth
