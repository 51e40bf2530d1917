"""What figures of a datasheet follow from others, and the names and figures that others have collected."""

import csv
import gzip
from pathlib import Path

import pytest

from perfmodel.files.device_tables import device_names
from perfmodel.specs import HardwareSpec, load_hardware

DEVICES = {name: load_hardware(name) for name in device_names()}

# Dense operations of one unit in one clock, in fp32 (not on matrix units) and in 16 bits: CUDA programming guide
# (throughput of native arithmetic instructions by compute capability: multiply-adds count twice) and NVIDIA's
# whitepapers for tensor cores, GeForce at half rate with fp32 accumulation; AMD's CDNA and RDNA ISA guides and
# whitepapers; Intel's Xe-HPG and Xe2 overviews (16 or 8 vector and matrix engines of a Xe core).
FP32 = {
    **{f"sm_{each}": (256,) for each in ("50", "52", "53", "61", "62", "86", "87", "89", "90", "110", "120", "121")},
    **{f"sm_{each}": (128,) for each in ("60", "70", "72", "75", "80")},
    **dict.fromkeys(("gcn4", "gcn5", "rdna1", "rdna2", "cdna1", "cdna2"), (128,)),
    **dict.fromkeys(("rdna3", "rdna3.5", "rdna4", "cdna3", "cdna4", "alchemist", "battlemage"), (256,)),
    **{f"apple-m{each}": (256,) for each in range(1, 6)},
}
HALF = {
    **{"sm_50": (256,), "sm_52": (256,), "sm_53": (512,), "sm_60": (256,), "sm_61": (4,), "sm_62": (512,)},
    **{"sm_70": (1024,), "sm_72": (1024,), "sm_75": (256, 512, 1024), "sm_80": (2048,), "sm_86": (512, 1024)},
    **{"sm_87": (2048,), "sm_89": (512, 1024), "sm_90": (4096,), "sm_110": (8192,), "sm_120": (512, 1024)},
    **{"sm_121": (1024,), "gcn4": (128,), "gcn5": (256,), "rdna1": (256,), "rdna2": (256,), "rdna3": (512,)},
    **{"rdna3.5": (512,), "rdna4": (1024,), "cdna1": (1024,), "cdna2": (1024,), "cdna3": (2048,), "cdna4": (4096,)},
    **{"alchemist": (2048,), "battlemage": (2048,), "apple-m5": (1024,)},
    **{f"apple-m{each}": (256,) for each in range(1, 5)},
}
# fp32 runs at the boost clock of 1,980 (NVL: 1,785) MHz, the tensor peaks are stated at the clock of the file.
OTHER_CLOCK = {"h100-sxm-80gb", "h200-sxm", "gh200", "h100-nvl", "h200-nvl", "h800-sxm", "h20", "gh200-144gb"}
# NVIDIA states tensor peaks at less than the boost clock of the H100 PCIe card (756 TFLOPS: 1,620 of 1,755 MHz), and
# 70 TFLOPS of the A10G.
OTHER_RATE = {"h100-pcie-80gb", "a10g"}


def per_clock(device: HardwareSpec, rate: float) -> float:
    return rate / device.declared.compute_units / device.declared.clock_hz


def of_generation(device: HardwareSpec, table: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    declared = device.declared
    return table.get(declared.compile_target or "", ()) or table.get(declared.architecture or "", ())


def test_bandwidth_is_bus_width_times_rate() -> None:
    """Vendors round: the MI300X's 8192 x 5.2 / 8 = 5,325 GB/s is printed as 5.3 TB/s."""
    compared = 0
    for device in DEVICES.values():
        memory = device.declared.memory[0]
        if memory.bus_width_bits is None or memory.transfers_per_s is None:
            continue
        compared += 1
        assert memory.bus_width_bits * memory.transfers_per_s / 8 == pytest.approx(
            device.memory_bandwidth, rel=0.006
        ), device.name
    assert compared > 1100


def test_fp32_is_units_times_clock_times_operations() -> None:
    compared = 0
    for name, device in DEVICES.items():
        allowed = of_generation(device, FP32)
        if not allowed or device.kind != "gpu" or name in OTHER_CLOCK:
            continue
        compared += 1
        vector = device.declared.vector_flops_per_s
        assert vector is not None
        assert any(per_clock(device, vector) == pytest.approx(each, rel=0.06) for each in allowed), name
    assert compared > 350


def test_half_precision_is_units_times_clock_times_operations() -> None:
    compared = 0
    for name, device in DEVICES.items():
        allowed = of_generation(device, HALF)
        if not allowed or device.kind != "gpu" or name in OTHER_RATE:
            continue
        compared += 1
        rate = per_clock(device, device.declared.peak_flops_per_s["fp16"])
        assert any(rate == pytest.approx(each, rel=0.06) for each in allowed), (name, rate)
    assert compared > 350


def test_matrix_units_are_faster_than_the_others() -> None:
    """Whether a GPU has them is what its rates say: a format of 16 bits above twice fp32 on the vector units."""
    for name, device in DEVICES.items():
        peaks = device.declared.peak_flops_per_s
        if device.kind == "gpu" and device.declared.instructions:
            vector = device.declared.vector_flops_per_s or peaks["fp32"]
            fast = max(peaks.get("fp16_acc16", 0.0), peaks["fp16"]) / vector
            has_matrix_units = "matrix" in device.declared.instructions
            assert (fast >= 4) == has_matrix_units or of_generation(device, FP32) == (256,), name
            assert fast <= 2.1 or has_matrix_units, name


def test_memory_of_integrated_gpus_is_the_cpus_as_well() -> None:
    integrated = {
        name for name, device in DEVICES.items() if device.declared.memory[0].unified and device.kind == "gpu"
    }
    assert {"apple-m2-ultra-76gpu", "strix-halo-395", "dgx-spark", "jetson-orin-nano", "arc-140v"} <= integrated
    assert not {"rtx-4090", "mi300x", "rx-7900-xtx", "arc-b580"} & integrated
    mac = load_hardware("apple-m1-max-32gpu")
    assert mac.visible_memory_bytes == 0.75 * mac.memory_bytes


# Figures as vendors print them on product pages, beside what the tables compute them from: GB/s, TFLOPS in fp32.
PRINTED = {
    "gtx-1080-ti": (484, 11.3),
    "p40": (346, 12),
    "p100-pcie": (732, 9.3),
    "v100-sxm2": (900, 15.7),
    "v100s-pcie": (1134, 16.4),
    "rtx-2080-ti": (616, 13.4),
    "titan-rtx": (672, 16.3),
    "quadro-rtx-5000": (448, 11.2),
    "rtx-3080-ti": (912, 34.1),
    "rtx-3070": (448, 20.3),
    "a30": (933, 10.3),
    "rtx-a4500": (640, 23.7),
    "rtx-4080": (717, 48.7),
    "rtx-4060": (272, 15),
    "rtx-6000-ada": (960, 91.1),
    "l40": (864, 90.5),
    "rtx-5090": (1792, 104.8),
    "rtx-5070-ti": (896, 43.9),
    "rtx-pro-4000": (672, 46.9),
    "dgx-spark": (273, None),
    "jetson-orin-nano-super": (102, None),
    "radeon-vii": (1024, 13.4),
    "mi60": (1024, 14.7),
    "mi100": (1229, 46.1),
    "mi210": (1638, 45.3),
    "mi325x": (6000, 163.4),
    "mi355x": (8000, 157.3),
    "rx-6800-xt": (512, 20.7),
    "rx-7900-xtx": (960, 61.4),
    "rx-9070-xt": (640, 48.7),
    "radeon-pro-w7900": (864, 61.3),
    "strix-halo-395": (256, None),
    "arc-a770": (560, 17.2),
    "arc-pro-b60": (456, None),
    "apple-m1-max-32gpu": (410, None),
    "apple-m4-max-40gpu": (546, None),
    "apple-m5-10gpu": (153.6, None),
    "core-i9-14900k": (89.6, None),
    "epyc-9755": (576, None),
    "xeon-platinum-8592": (358.4, None),
    "ryzen-threadripper-7980x": (166.4, None),
    "altra-max": (204.8, None),
}


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_figures_that_vendors_print(name: str, printed: tuple[float, float | None]) -> None:
    device = load_hardware(name)
    assert device.memory_bandwidth / 1e9 == pytest.approx(printed[0], rel=0.01)
    if printed[1] is not None:
        assert device.declared.peak_flops_per_s["fp32"] / 1e12 == pytest.approx(printed[1], rel=0.025)


def rows_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return list(csv.DictReader(file))


def test_every_device_that_was_measured_is_known(shared: Path) -> None:
    truth = shared / "truth"
    files = [*(truth / "local").glob("*.csv.gz"), truth / "local" / "devices.csv"]
    files += [truth / "serving" / f"{name}.csv.gz" for name in ("mlperf", "other_devices", "steady_state")]
    columns = ("device", "accelerator", "system")
    names: set[str] = set()
    for file in files:
        rows = rows_of(file)
        column = next(each for each in columns if each in rows[0])
        names |= {row[column] for row in rows}
    assert len(names) > 150
    assert [name for name in sorted(names) if load_hardware(name) is None] == []


# Columns of the collected facts that are somebody's memory, too: memory, bandwidth and rates of GPUs that differ, each
# with what a vendor says.
DIFFER = {
    "a100-80gb (form factor unstated)": "the name means the SXM module here, the facts are the PCIe card's",
    "h100-pcie-80gb": "NVIDIA's datasheet says 2 TB/s",
    "rtx-4060-laptop-8gb": "at another clock of laptops",
    "jetson-orin-8gb": "fp16 of the tensor cores at 8.4, not 8 x 625 MHz x 2,048",
}


def test_the_devices_agree_with_the_collected_facts(shared: Path) -> None:
    compared, differ = 0, set()
    for row in rows_of(shared / "truth" / "local" / "devices.csv"):
        if row["class"] == "cpu":
            continue  # their operations are computed from a rule of thumb there
        device, peaks = load_hardware(row["device"]), load_hardware(row["device"]).declared.peak_flops_per_s
        pairs = [
            (row["memory_gb"], device.memory_bytes / 1e9, 0.01),
            (row["memory_bandwidth_gb_s"], device.memory_bandwidth / 1e9, 0.01),
            (row["fp32_tflops"], peaks.get("fp32", 0.0) / 1e12, 0.08),
            (row["fp16_tensor_fp32_accumulate_tflops"], peaks.get("fp16", 0.0) / 1e12, 0.08),
            (row["int8_dense_tops"], peaks.get("int8", 0.0) / 1e12, 0.08),
        ]
        for fact, ours, tolerance in pairs:
            if fact and ours:
                compared += 1
                if float(fact) != pytest.approx(ours, rel=tolerance):
                    differ.add(row["device"])
    assert differ == set(DIFFER)
    assert compared > 350


def test_bandwidth_of_cpus_agrees_with_the_collected_facts(shared: Path) -> None:
    rows = [row for row in rows_of(shared / "truth" / "local" / "devices.csv") if row["class"] == "cpu"]
    assert len(rows) > 80
    for row in rows:
        ours = load_hardware(row["device"]).memory_bandwidth / 1e9
        assert float(row["memory_bandwidth_gb_s"]) == pytest.approx(ours, rel=0.01), row["device"]


# Links of a device in one direction, as vendors count them: NVLink 1 to 5 with 4, 6, 12, 18 and 18 links of 20, 25, 25,
# 25 and 50 GB/s; ports of Ethernet between the cards of a server; half of what Google prints for both ways of a chip.
LINKS = {
    ("p100-sxm2", "nvlink"): 4 * 20,
    ("v100-sxm2", "nvlink"): 6 * 25,
    ("a100-sxm-80gb", "nvlink"): 12 * 25,
    ("a800-sxm", "nvlink"): 8 * 25,
    ("h100-sxm-80gb", "nvlink"): 18 * 25,
    ("h100-nvl", "nvlink"): 12 * 25,
    ("h200-nvl", "nvlink"): 18 * 25,
    ("b200-sxm", "nvlink"): 18 * 50,
    ("gb300", "nvlink"): 18 * 50,
    ("mi300x", "infinity_fabric"): 7 * 64,
    ("mi355x", "infinity_fabric"): 7 * 76.8,
    ("gaudi-2", "ethernet"): 21 * 100 / 8,
    ("gaudi-3", "ethernet"): 21 * 200 / 8,
    ("tpu-v5e", "ici"): 400 / 2,
    ("tpu-v5p", "ici"): 1200 / 2,
    ("tpu-v6e", "ici"): 800 / 2,
    ("tpu-v7x", "ici"): 1200 / 2,
}


@pytest.mark.parametrize(("place", "gigabytes_per_s"), LINKS.items(), ids=str)
def test_links_are_those_of_one_direction(place: tuple[str, str], gigabytes_per_s: float) -> None:
    link = load_hardware(place[0]).link(place[1])
    assert link is not None
    assert link.bandwidth_bytes_per_s / 1e9 == pytest.approx(gigabytes_per_s, rel=0.001)


def test_pcie_is_16_lanes_of_a_generation_or_fewer() -> None:
    """A lane of 8, 16, 32 GT/s with 128b/130b, of 64 GT/s with flits; TPUs' hosts are not stated by the generation."""
    lanes = [each * 128 / 130 / 8 for each in (8, 16, 32)] + [7.563]
    possible = [lane * count for lane in lanes for count in (4, 8, 16)]
    for name, device in DEVICES.items():
        link = device.link("pcie")
        if link is not None and device.kind != "tpu":
            rate = link.bandwidth_bytes_per_s / 1e9
            assert any(rate == pytest.approx(each, rel=0.01) for each in possible), (name, rate)


def test_sparse_products_are_faster_from_ampere_and_cdna_3_and_rdna_4_on() -> None:
    """NVIDIA: third generation of tensor cores; AMD: MI300 and RX 9000; nobody's peaks are the sparse ones."""
    for name, device in DEVICES.items():
        target, architecture = device.declared.compile_target or "", device.declared.architecture
        is_nvidia = target.startswith("sm_") and int(target[3:]) >= 80
        has_them = is_nvidia or architecture in ("cdna3", "cdna4", "rdna4")
        assert device.declared.sparsity_speedup == (2.0 if has_them else 1.0), name


def test_cards_say_whether_they_reach_each_other() -> None:
    """NVIDIA/nccl issue 1127 and tinygrad/open-gpu-kernel-modules: no peer to peer on GeForce RTX 40 and 50."""
    for name, expected in {"rtx-4090": False, "rtx-4060-ti": False, "rtx-5090": False, "l40s": True}.items():
        link = load_hardware(name).link("pcie")
        assert link is not None
        assert link.peer_to_peer is expected
    patched = load_hardware("rtx-4090", ["hardware.pcie.peer_to_peer=true"]).link("pcie")
    assert patched is not None
    assert patched.peer_to_peer is True
