"""What a machine says of itself, read from what its tools print; the file that starts from it."""

import json

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.specs import detect as machines
from perfmodel.specs import load_hardware
from perfmodel.specs.detect import (
    COMMANDS,
    Graphics,
    Machine,
    Processor,
    copy_bandwidth,
    from_cpuinfo,
    from_system_profiler,
    graphics_file,
    processor_file,
    read_graphics,
    summary,
    this_machine,
)

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: 12th Gen Intel(R) Core(TM) i7-12700K
cpu MHz\t\t: 3600.000
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 fma avx_vnni

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: 12th Gen Intel(R) Core(TM) i7-12700K
cpu MHz\t\t: 3600.000
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 fma avx_vnni

processor\t: 2
vendor_id\t: GenuineIntel
model name\t: 12th Gen Intel(R) Core(TM) i7-12700K
cpu MHz\t\t: 3600.000
physical id\t: 0
core id\t\t: 4
flags\t\t: fpu sse4_2 avx avx2 fma avx_vnni
"""
MEMINFO = "MemTotal:       32768000 kB\nMemFree:        1000 kB\n"
RASPBERRY = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes crc32 asimdrdm lrcpc dcpop asimddp
CPU part\t: 0xd0b

processor\t: 1
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes crc32 asimdrdm lrcpc dcpop asimddp
CPU part\t: 0xd0b

Revision\t: d04171
Model\t\t: Raspberry Pi 5 Model B Rev 1.1
"""
MAC = {
    "SPHardwareDataType": [
        {"chip_type": "Apple M1 Max", "number_processors": "proc 10:8:2", "physical_memory": "64 GB"},
    ]
}
PRINTED = {
    "nvidia-smi": (
        "NVIDIA GeForce RTX 4090, 24564, 3105, 450.00, 4, 16\nNVIDIA GeForce RTX 3060, 12288, 2100, 170.00, 4, 16\n"
    ),
    "amd-smi": json.dumps(
        [
            {
                "gpu": 0,
                "asic": {"market_name": "AMD Radeon RX 7900 XTX"},
                "vram": {"size": {"value": 24560, "unit": "MB"}},
            }
        ]
    ),
    "rocm-smi": json.dumps(
        {
            "card0": {"Card Series": "AMD Radeon RX 7900 XTX", "VRAM Total Memory (B)": "25753026560"},
            "system": {"Driver version": "6.8"},
        }
    ),
    "xpu-smi": 'Device ID,Device Name,Memory Physical Size\n0,"Intel(R) Arc(TM) B580 Graphics","12216.00 MiB"\n',
    "system_profiler": json.dumps({"SPDisplaysDataType": [{"sppci_model": "Apple M1 Max", "sppci_cores": "32"}]}),
}
KNOWN = {
    "nvidia-smi": ["rtx-4090", "rtx-3060"],
    "amd-smi": ["rx-7900-xtx"],
    "rocm-smi": ["rx-7900-xtx"],
    "xpu-smi": ["arc-b580"],
    "system_profiler": ["apple-m1-max-32gpu"],
}


def test_linux_describes_its_processor():
    """Three hardware threads on two cores; the newest of instructions that include older ones."""
    found = from_cpuinfo(CPUINFO, MEMINFO, "5000000\n")
    assert found == Processor(
        name="12th Gen Intel(R) Core(TM) i7-12700K",
        num_cores=2,
        instructions=("avx2", "avx_vnni"),
        memory_bytes=32768000 * 1024,
        clock_hz=5e9,
    )
    assert load_hardware(found.name).name == "core-i7-12700k"


def test_a_single_board_names_its_model():
    found = from_cpuinfo(RASPBERRY)
    assert (found.num_cores, found.instructions, found.clock_hz) == (2, ("neon", "dotprod"), None)
    assert load_hardware(found.name).name == "raspberry-pi-5"


def test_a_mac_describes_its_processor():
    found = from_system_profiler(MAC)
    assert (found.num_cores, found.num_performance_cores, found.memory_bytes) == (10, 8, 64 * 2**30)
    assert load_hardware(found.name).name == "apple-m1-max-cpu-8p2e"


@pytest.mark.parametrize("tool", COMMANDS)
def test_tools_name_gpus_that_are_known(tool):
    assert [load_hardware(each.name).name for each in read_graphics(tool, PRINTED[tool])] == KNOWN[tool]


def test_figures_of_tools_have_units():
    first, second = read_graphics("nvidia-smi", PRINTED["nvidia-smi"])
    assert first == Graphics("NVIDIA GeForce RTX 4090", "nvidia-smi", 24564 * 2**20, 3.105e9, 450.0, "4.0x16")
    assert second.power_w == 170
    assert read_graphics("amd-smi", PRINTED["amd-smi"])[0].memory_bytes == 24560 * 2**20
    assert read_graphics("rocm-smi", PRINTED["rocm-smi"])[0].memory_bytes == 25753026560
    assert read_graphics("xpu-smi", PRINTED["xpu-smi"])[0].memory_bytes == 12216 * 2**20


def test_figures_that_a_tool_does_not_know_are_left_out():
    (found,) = read_graphics("nvidia-smi", "NVIDIA GB10, [N/A], 3003, [N/A], 5, [N/A]\n")
    assert (found.memory_bytes, found.power_w, found.pcie) == (None, None, None)
    assert load_hardware(found.name).name == "dgx-spark"


@pytest.mark.parametrize("tool", COMMANDS)
@pytest.mark.parametrize("printed", ["", "no devices were found\n", "{}", "[1, 2]", "a,b,c\n1,2,3\n"])
def test_what_is_no_answer_is_no_gpu(tool, printed):
    assert read_graphics(tool, printed) == []


def test_the_file_of_a_gpu_is_the_known_one_with_its_own_memory_and_power(tmp_path):
    found = Graphics("NVIDIA GeForce RTX 4070 Ti", "nvidia-smi", 12282 * 2**20, 3e9, 200.0)
    path = tmp_path / "mine.yaml"
    path.write_text(graphics_file(found))
    mine, known = load_hardware(path), load_hardware("rtx-4070-ti")
    assert (mine.name, mine.declared.tdp_w) == ("my-rtx-4070-ti", 200)
    assert mine.visible_memory_bytes == 12282 * 2**20
    assert mine.declared.peak_flops_per_s == pytest.approx(known.declared.peak_flops_per_s)
    assert set(mine.declared.unconfirmed) == set(known.declared.unconfirmed)
    assert "this machine" in mine.declared.source


def test_a_gpu_that_is_not_known_is_refused_with_the_way_out():
    with pytest.raises(SpecError, match=r"no device is known as 'Voodoo 2'.*hardware new my-voodoo-2 --like"):
        graphics_file(Graphics("Voodoo 2", "nvidia-smi"))


def test_the_file_of_a_processor_without_a_known_name_says_what_is_measured(tmp_path):
    """8 cores x 3 GHz x 32 operations = 768 GFLOPS."""
    found = Processor("Some Processor 9", 8, instructions=("avx2",), memory_bytes=16e9, clock_hz=3e9)
    path = tmp_path / "mine.yaml"
    path.write_text(processor_file(Machine(found, (), 40.04e9)))
    mine = load_hardware(path)
    assert mine.memory_bandwidth == 40e9
    assert mine.declared.peak_flops_per_s == {"fp32": 768e9}
    assert "memory.hbm.bandwidth_bytes_per_s" in mine.declared.unconfirmed


def test_the_file_of_a_known_processor_has_the_memory_that_is_there(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(processor_file(Machine(from_cpuinfo(CPUINFO, MEMINFO), (), 40e9)))
    mine = load_hardware(path)
    assert mine.memory_bytes == pytest.approx(32768000 * 1024, rel=0.01)
    assert mine.declared.compute_units == load_hardware("core-i7-12700k").declared.compute_units


def test_copies_are_counted_both_ways():
    """At least what a memory of the slowest single board does, at most a few caches' worth."""
    assert 1e8 < copy_bandwidth(0.05) < 1e13


def test_only_tools_that_are_there_are_run(monkeypatch):
    asked = []
    monkeypatch.setattr(machines.shutil, "which", lambda tool: "/bin/it" if tool == "amd-smi" else None)

    class Done:
        returncode = 0
        stdout = PRINTED["amd-smi"]

    def run(command, **options):
        asked.append(command[0])
        return Done

    monkeypatch.setattr(machines.subprocess, "run", run)
    found = this_machine(0.01)
    assert asked == ["amd-smi"]
    assert [each.name for each in found.graphics] == ["AMD Radeon RX 7900 XTX"]
    assert "known as rx-7900-xtx" in summary(found)


@pytest.mark.parametrize("flags", [[], ["--cpu"]])
def test_this_machine_is_detected(flags, tmp_path):
    done = CliRunner().invoke(app, ["hardware", "detect", "--seconds", "0.1", *flags])
    assert done.exit_code == 0, done.output
    path = tmp_path / "mine.yaml"
    path.write_text(done.stdout)
    assert load_hardware(path).memory_bandwidth > 0
