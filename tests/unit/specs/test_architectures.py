"""What is known of an architecture: its relatives, and that a new one is a file of its own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfmodel.cost.calibrations.files import load_calibration
from perfmodel.cost.calibrations.whole_runs import _nearest, load_whole_runs
from perfmodel.files.catalog import data_dir
from perfmodel.specs import EngineSpec, load_hardware, load_scenario
from perfmodel.specs import architectures as room
from perfmodel.specs.architectures import find_architecture, generations_between, name_in_tables
from perfmodel.specs.engine.formats import format_use


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [
        ("hopper", "hopper", 0),
        ("ampere", "hopper", 1),
        ("turing", "blackwell", 3),
        ("turing", "blackwell-consumer", 3),
        ("hopper", "ada", None),  # both after Ampere, neither from the other
        ("blackwell", "blackwell-consumer", None),
        ("hopper", "blackwell-consumer", 1),  # compiled for alike
        ("cdna1", "cdna4", 3),
        ("hopper", "cdna3", None),
        ("zen4", "zen4", 0),
        ("zen4", None, None),
    ],
)
def test_generations_are_counted_along_a_line_and_either_way(one: str, other: str | None, steps: int | None) -> None:
    assert generations_between(one, other) == steps
    assert generations_between(other, one) == steps


def test_relatives_are_one_step_away() -> None:
    names = {file.stem for file in data_dir("architectures").glob("*.yaml")}
    for name in names:
        fact = find_architecture(name)
        assert fact.name == name
        for relative in (*fact.after, *fact.contemporaries):
            assert relative in names or find_architecture(relative) == room.Architecture(name=relative)
            assert fact.steps_from(relative) == 1 or relative in fact.contemporaries


@pytest.fixture
def rubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A device of a new architecture: its own file, and one of the architecture."""
    folder = tmp_path / "architectures"
    shutil.copytree(data_dir("architectures"), folder)
    text = "name: rubin\nafter: [blackwell]\nsupported_as: blackwell\nswitch_ranks: 8\n"
    (folder / "rubin.yaml").write_text(text, encoding="utf-8")
    device = (data_dir("hardware") / "b200-sxm.yaml").read_text(encoding="utf-8")
    device = device.replace("architecture: blackwell", "architecture: rubin").replace("name: b200-sxm", "name: r200")
    head, _, rest = device.partition("aliases:")
    (tmp_path / "r200.yaml").write_text(head + rest.partition("\n")[2], encoding="utf-8")
    monkeypatch.setattr(room, "data_dir", lambda kind: folder)
    find_architecture.cache_clear()
    yield tmp_path / "r200.yaml"
    find_architecture.cache_clear()


def test_a_device_of_a_new_architecture_needs_its_file_and_one_of_the_architecture(rubin: Path) -> None:
    """Its kernels come from the nearest of the line, with wider intervals than those of the architecture before;
    formats have that one's support; and a scenario is served."""
    device, before = load_hardware(str(rubin)), load_hardware("b200-sxm")
    passed, from_before = load_calibration(device, "vllm"), load_calibration(before, "vllm")
    assert passed is not None
    assert from_before is not None
    assert "b200-sxm" in passed.source
    assert passed.spread > from_before.spread
    engine = EngineSpec()
    for form in ("fp8", "nvfp4", "int8"):
        assert format_use(engine, device, form) == format_use(engine, before, form)
    scenario = load_scenario("llama-3.1-8b-a100", [f"hardware={rubin}", "engine.quantization=fp8"])
    assert scenario.hardware.declared.architecture == "rubin"


def test_rows_that_name_an_architecture_go_before_those_it_is_supported_as(rubin: Path) -> None:
    assert name_in_tables("rubin", {"blackwell", "hopper"}) == "blackwell"
    assert name_in_tables("rubin", {"rubin", "hopper"}) == "rubin"
    assert name_in_tables("hopper", {"blackwell"}) == "hopper"
    assert name_in_tables(None, {"blackwell"}) is None


def test_of_two_relatives_equally_far_the_older_one_stands_for_an_architecture() -> None:
    """Kernels are ported from one generation to the next."""
    fits = load_whole_runs()
    fit = fits.architectures["cdna3"]
    both = fits.model_copy(update={"architectures": {"cdna4": fit, "cdna2": fit}})
    nearest = _nearest("cdna3", both)
    assert nearest is not None
    assert nearest[0] == "cdna2"
