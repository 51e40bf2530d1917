"""Names, aliases and paths."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir, expanded, find_file, list_names
from perfmodel.models import load_model


@pytest.mark.parametrize("kind", ["models", "hardware", "traffic", "scenarios", "calibrations"])
def test_every_kind_has_its_folder(kind: str) -> None:
    assert data_dir(kind).is_dir()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "a100-sxm-80gb",
        "a100-sxm-80gb.yaml",
        "A100-80GB-SXM",
        "a100_sxm",
        "NVIDIA A100 SXM 80GB",
        "nvidia a100-sxm4-80gb",
    ],
)
def test_names_and_aliases_lead_to_the_same_file(name: str) -> None:
    assert find_file("hardware", name).name == "a100-sxm-80gb.yaml"


def test_no_two_devices_share_a_name() -> None:
    import re

    seen: dict[str, str] = {}
    for name in list_names("hardware"):
        from perfmodel.specs import load_hardware

        for alias in (name, *load_hardware(name).aliases):
            key = re.sub(r"[\s_]+", "-", alias.lower())
            assert seen.setdefault(key, name) == name, f"{alias} means {seen[key]} and {name}"


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1\n")
    assert find_file("hardware", str(path)) == path
    assert find_file("hardware", path) == path


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("h10", "h100-pcie-80gb"), ("h200-smx", "h200-sxm"), ("rtx-4091", "rtx-4090"), ("mi300", "mi300x")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(SpecError, match="unknown hardware") as caught:
        find_file("hardware", name)
    assert "Did you mean" in str(caught.value)
    assert nearest in str(caught.value)


def test_nothing_near_is_answered_with_what_there_is() -> None:
    with pytest.raises(SpecError, match="Known: a10, a100-pcie-40gb"):
        find_file("hardware", "qqqqqqqq")


def test_a_missing_path_is_no_unknown_name() -> None:
    with pytest.raises(SpecError, match=r"^\./absent\.yaml: no such file\.$"):
        find_file("hardware", "./absent.yaml")


def test_an_installed_wheel_uses_its_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perfmodel.files import catalog

    folder = tmp_path / "perfmodel" / "_data" / "hardware_specs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("aliases:\n  - My Card  # the one I own\n  - 'mine-2'\n")
    monkeypatch.setattr(catalog, "PACKAGE", tmp_path / "perfmodel")
    catalog.aliases_of.cache_clear()
    try:
        assert catalog.list_names("hardware") == ["mine"]
        assert catalog.find_file("hardware", "my_card") == folder / "mine.yaml"
        assert catalog.find_file("hardware", "MINE-2") == folder / "mine.yaml"
        assert catalog.data_dir("traffic") == tmp_path / "workloads" / "traffic"  # not in this wheel: the checkout
    finally:
        catalog.aliases_of.cache_clear()


@pytest.mark.parametrize("name", ["~nobody-of-that-name", "~nobody-of-that-name/config.json", "~ "])
def test_the_home_of_nobody_is_a_name_like_any_other(name: str) -> None:
    assert expanded(name) == Path(name)
    with pytest.raises(SpecError):
        load_model(name)
    found = CliRunner().invoke(app, ["simulate", name])
    assert found.exit_code == 2
    assert found.stderr.startswith("error: ")
