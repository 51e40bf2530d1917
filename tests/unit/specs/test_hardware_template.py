"""A device's template is a file of that device, and explains every field that such a file can have."""

from pathlib import Path

import pytest

from perfmodel import specs
from perfmodel.errors import SpecError
from perfmodel.files.device_tables import table_rows
from perfmodel.specs.hardware import Declared, HardwareSpec, MemoryLevel, Price
from perfmodel.specs.hardware_template import hardware_template
from perfmodel.specs.networks import Link

FIGURES = (
    *("compute_units", "performance_cores", "instructions", "clock_hz", "peak_flops_per_s"),
    *("links", "tdp_w", "max_devices"),
)
OF_SCENARIOS = {"power_cap_w", "network"}  # what a scenario says of its devices


@pytest.mark.parametrize("name", specs.list_names("hardware"))
def test_the_template_of_a_known_device_says_what_its_file_says(name: str, tmp_path: Path) -> None:
    known, path = specs.load_hardware(name), tmp_path / "mine.yaml"
    path.write_text(hardware_template("mine", known))
    copy = specs.load_hardware(path)
    assert copy.name == "mine"
    assert copy.kind == known.kind
    ours, theirs = copy.declared, known.declared
    assert ours.architecture == (theirs.architecture or "my-own")
    for field in FIGURES:
        assert getattr(ours, field) == getattr(theirs, field), field
    # What a process is shown belongs to the device that was looked at, and is not handed on.
    assert ours.memory == tuple(level.model_copy(update={"visible_bytes": None}) for level in theirs.memory)


def test_the_template_of_a_row_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Of one row of each table: what its template is read as has the same template."""
    path = tmp_path / "mine.yaml"
    for row in {row.file: row for row in table_rows()}.values():
        text = hardware_template("mine", specs.load_hardware(row.name))
        path.write_text(text)
        assert hardware_template("mine", specs.load_hardware(path)) == text.replace(f"of {row.name}:", "of mine:")


def test_every_field_of_a_device_is_explained() -> None:
    text = hardware_template("mine", specs.load_hardware("h100-sxm-80gb"))
    for spec in (HardwareSpec, Declared, MemoryLevel, Link, Price):
        for field in spec.model_fields.keys() - OF_SCENARIOS:
            assert field in text, f"{spec.__name__}.{field}"


@pytest.mark.parametrize("name", ["../mine", "a/b", "", "x" * 61])
def test_a_template_is_not_called_after_a_path(name: str) -> None:
    with pytest.raises(SpecError, match="expected a name that a file can have"):
        hardware_template(name, specs.load_hardware("l4"))
