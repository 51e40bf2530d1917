"""The bill of materials names what the package runs with, and nothing that only its developers need."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytest.importorskip("cyclonedx_py", reason="the extra `publish` is not installed: `make sbom` installs it")
pytestmark = [pytest.mark.release, pytest.mark.xdist_group("sbom")]


@pytest.fixture(scope="module")
def bills(tmp_path_factory):
    """By extra, "" without any. The script holds each against its schema, and fails where one does not fit."""
    folder = tmp_path_factory.mktemp("sbom")
    command = [sys.executable, str(ROOT / "tools" / "sbom.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    files = {path.name.removesuffix(".cdx.json").partition("-")[2]: path for path in folder.iterdir()}
    return {extra: json.loads(path.read_text(encoding="utf-8")) for extra, path in files.items()}


def names(bill):
    return {each["name"].lower() for each in bill["components"]}


def test_each_requirement_is_there_with_what_it_requires(bills):
    for extra, bill in bills.items():
        wanted = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
        asked = [Requirement(line) for line in wanted]
        assert {each.name.lower() for each in asked if each.marker is None or each.marker.evaluate()} <= names(bill)
    assert {"typing_extensions", "pydantic_core"} <= {name.replace("-", "_") for name in names(bills[""])}


def test_nothing_is_there_that_only_developers_need(bills):
    for bill in bills.values():
        assert not {"pytest", "ruff", "mypy", "twine", "hypothesis", "perfmodel"} & names(bill)
    assert "torch" not in names(bills[""])
    assert {"test", "check", "publish"}.isdisjoint(bills)


def test_each_library_has_a_version_a_package_url_and_a_licence(bills):
    for bill in bills.values():
        for each in bill["components"]:
            assert each["version"]
            assert each["purl"].startswith("pkg:pypi/")
            assert each["licenses"], each["name"]


def test_all_that_is_named_is_reached_from_the_package(bills):
    for bill in bills.values():
        edges = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
        root = bill["metadata"]["component"]["bom-ref"]
        reached, todo = {root}, [root]
        while todo:
            for ref in edges[todo.pop()]:
                if ref not in reached:
                    reached.add(ref)
                    todo.append(ref)
        assert reached - {root} == {each["bom-ref"] for each in bill["components"]}
