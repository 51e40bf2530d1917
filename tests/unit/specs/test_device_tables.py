"""Siblings in one table: a row is a device as a file of its own would describe it, under every usual spelling."""

from collections import Counter
from pathlib import Path

import pytest

from perfmodel.errors import SpecError
from perfmodel.files import catalog, device_tables
from perfmodel.files.catalog import normal_name
from perfmodel.files.device_tables import plain_name, split_size
from perfmodel.specs import data_dir, list_hardware, load_hardware, load_scenario
from perfmodel.specs.devices import find_device

TABLE = """
kind: gpu
maker: somebody
source: "a whitepaper"
unconfirmed: [gbit_s, memory.sram.capacity_bytes]
operations_per_clock: {fp32: 256, fp16: 1024, vector: 128}
shared:
  architecture: my-own
  instructions: [matrix]
  memory: [{level: sram, capacity_bytes: 100 KiB, per: compute_unit}]
  links: [{name: pcie, latency_s: 1 us, peer_to_peer: false}]
columns:    [units, clock_mhz, memory_gb, technology, bus_bits, gbit_s, l2_mib, pcie,   tdp_w]
devices:
  card-100: [   10,      2000,   [8, 16], GDDR6,           256,     16,      4, 4.0x8,    100]
  card-200: [   20,      2500,        12, GDDR6X,          192,     21,      ~, 4.0x16,     ~]
aliases:
  card-200: [Twentieth Card, "gpu of mine"]
exceptions:
  card-200: {links: [{name: bridge, bandwidth_bytes_per_s: 50 GB/s}], peak_flops_per_s: {fp16: 9 TFLOPS}}
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A folder of devices with one table."""
    folder = tmp_path / "hardware_specs"
    (folder / "families").mkdir(parents=True)
    file = folder / "families" / "cards.yaml"
    file.write_text(TABLE)
    (folder / "prices").mkdir()
    (folder / "prices/prices.yaml").write_text("prices: {}\n")
    monkeypatch.setattr(catalog, "PACKAGE", tmp_path / "perfmodel")
    tables = (device_tables.table_rows, device_tables._known, device_tables.known_architectures)
    caches = (catalog.aliases_of, *tables)
    for cached in caches:
        cached.cache_clear()
    yield file
    for cached in caches:
        cached.cache_clear()


def test_a_row_is_a_device(table):
    """Bandwidth 256 bit x 16 Gbit/s / 8 = 512 GB/s; fp32 10 units x 2 GHz x 256 = 5.12 TFLOPS; PCIe 4.0 x8: 15.75."""
    card = load_hardware("card-100")
    declared = card.declared
    assert (card.name, card.kind, card.maker) == ("card-100", "gpu", "somebody")
    assert (card.memory_bytes, card.memory_bandwidth) == (8e9, 512e9)
    assert declared.peak_flops_per_s == {"fp32": 5.12e12, "fp16": 20.48e12}
    assert declared.vector_flops_per_s == 2.56e12
    assert [level.level for level in declared.memory] == ["hbm", "l2", "sram"]
    assert declared.links[0].bandwidth_bytes_per_s == pytest.approx(15.75e9)
    assert declared.links[0].peer_to_peer is False
    assert declared.source == "a whitepaper"
    assert set(declared.unconfirmed) == {
        *("memory.hbm.transfers_per_s", "memory.hbm.bandwidth_bytes_per_s", "memory.sram.capacity_bytes"),
    }


def test_a_device_of_a_table_may_be_an_exception(table):
    card = load_hardware("card-200")
    assert card.declared.peak_flops_per_s == {"fp32": 12.8e12, "fp16": 9e12}
    assert [link.name for link in card.declared.links] == ["pcie", "bridge"]
    assert card.declared.tdp_w is None
    assert card.level("l2") is None


def test_a_row_may_be_unconfirmed_as_a_whole(table):
    table.write_text(
        TABLE.replace("operations_per_clock:", "unconfirmed_devices: [card-200]\noperations_per_clock:", 1)
    )
    assert "compute_units" in load_hardware("card-200").declared.unconfirmed
    assert "compute_units" not in load_hardware("card-100").declared.unconfirmed


def test_a_size_in_the_name_is_one_that_the_device_comes_with(table):
    assert load_hardware("card-100-16gb").memory_bytes == 16e9
    assert load_hardware("card-100-16gb").name == "card-100-16gb"
    assert load_hardware("card-100-8gb").name == "card-100"
    with pytest.raises(SpecError, match=r"unknown hardware 'card-100-12gb'.*'card-100'"):
        load_hardware("card-100-12gb")


@pytest.mark.parametrize("name", ["Twentieth Card", "twentieth_card", "GPU of mine", "AMD card 200", "card-200-12gb"])
def test_a_row_has_aliases(table, name):
    assert load_hardware(name).name == "card-200"


def test_what_if_reaches_into_a_row(table):
    assert load_hardware("card-200", ["hardware.hbm.bandwidth=2x"]).memory_bandwidth == 2 * 192 * 21e9 / 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("10,      2000", "10"), "devices.card-100 has 8 figures; expected 9: one a column"),
        (("10,      2000", "10,   10,   2000"), "devices.card-100 has 10 figures; expected 9: one a column"),
        (("10,      2000", "10,      -2000"), "declared.clock_hz: got -2"),
        (("tdp_w]", "tpd_w]"), "columns.8"),
        (("maker: somebody", "marker: somebody"), "marker: unknown"),
    ],
)
def test_a_mistake_is_found_on_its_line(table, change, says):
    table.write_text(TABLE.replace(*change))
    with pytest.raises(SpecError) as caught:
        load_hardware("card-100")
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{table}:")


@pytest.mark.parametrize(
    ("printed", "plain"),
    [
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx-3060-laptop"),
        ("NVIDIA GeForce GTX 1070 with Max-Q Design", "gtx-1070-max-q"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA RTX 3500 Ada Generation Laptop GPU", "rtx-3500-ada-laptop"),
        ("Raspberry Pi 5 Model B Rev 1.1", "raspberry-pi-5"),
        ("AMD Radeon 780M Graphics", "780m"),
        ("radeon-780m-igpu", "780m"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "core-i7-8550u"),
        ("11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz", "core-i7-1165g7"),
        ("Intel Xeon CPU E5-2697 v2 @ 2.70GHz (ivybridge)", "xeon-e5-2697-v2"),
        ("AMD Ryzen 7 4700U with Radeon Graphics", "ryzen-7-4700u"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "ryzen-9-5950x"),
        ("AMD FX(tm)-8320 Eight-Core Processor", "fx-8320"),
        ("cpu-core-ultra-7-155h", "core-ultra-7-155h"),
        ("gpu", "gpu"),
    ],
)
def test_one_spelling_for_all(printed, plain):
    assert plain_name(printed) == plain
    assert plain_name(plain) == plain


def test_a_size_stands_at_the_end_of_a_name():
    assert split_size("rtx-4060-ti-16gb") == ("rtx-4060-ti", 16)
    assert split_size("rtx-4060-ti") is None


@pytest.mark.parametrize(
    "name",
    ["ryzen-ai-max+395", "Ryzen AI Max+ 395", "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "ryzen-ai-max-plus-395"],
)
def test_the_product_name_of_an_apu_is_its_gpu(name):
    """Models run on its GPU; the name without the plus is the CPU."""
    assert load_hardware(name).name == "strix-halo-395"
    assert load_hardware("ryzen-ai-max-395").kind == "cpu"


def test_no_two_devices_answer_to_one_name():
    """Neither as written nor without makers and what drivers print around a name."""
    spellings = [*device_tables._spellings()]
    claimed = {(row.name, each) for row, text in spellings for each in (normal_name(text), plain_name(text))}
    twice = {name for name, count in Counter(name for _, name in claimed).items() if count > 1}
    assert not sorted((name, device) for device, name in claimed if name in twice)


@pytest.mark.parametrize("file", sorted(data_dir("families").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_row_is_one_line(file: Path):
    """What the names are read from without parsing the table is all of it."""
    from perfmodel.specs import load_yaml

    rows = [row.name for row in device_tables.table_rows() if row.file == file]
    data = load_yaml(file).data
    assert rows == list(data["devices"])
    assert {*data.get("aliases", {}), *data.get("exceptions", {}), *data.get("unconfirmed_devices", ())} <= set(rows)


def test_a_row_serves_in_a_scenario():
    row = device_tables.table_rows()[0].name
    scenario = load_scenario("llama-3.1-8b-a100", [f"hardware={row}"])
    assert scenario.hardware.name == row
    assert row in list_hardware()
    assert find_device(row).row == row


def test_known_architectures_are_those_declared_by_devices():
    """Read from the lines of files and tables, without parsing them."""
    declared = {load_hardware(name).declared.architecture for name in list_hardware()}
    assert device_tables.known_architectures() == declared - {None}
