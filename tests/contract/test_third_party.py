"""What others made is named with its licence: each copied file, each source of figures, each text of a licence."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "THIRD_PARTY.md"
NOT_OURS = {".git", ".venv", "build", "dist", "out", "node_modules", "site", "shared"}
ASSETS = {".js", ".css", ".woff", ".woff2", ".ttf", ".otf", ".ico", ".png", ".jpg", ".wasm"}
# Written here. A new asset is either one of these or a row of THIRD_PARTY.md.
WRITTEN_HERE = (
    "perfmodel/report/*.css",
    "perfmodel/web/static/*.css",
    "perfmodel/web/static/*.js",
    "tools/docs_site/theme/*",
    "docs/*.png",
)
LICENCES = {"Apache-2.0", "MIT", "0BSD", "CC-BY-4.0"}
BY_LINK = {"CC-BY-4.0"}  # which lets a link stand for its text (section 3(a)(1)(C)); figures alone, not shipped
# Sets of validated cells whose rows the package carries, and the folders of measurements whose figures stand in them.
VALIDATED = {
    "each-request-": "per-request",
    "llama-cpp-on-single-machines-by-device": "local",
    "mlperf-inference-by-device": "mlperf",
    "separate-prefill-and-decode-workers": "steady-state",
    "servers-at-a-fixed-concurrency": "steady-state",
    "servers-on-other-devices-by-device": "served",
    "tensorrt-llm-offline": "throughput",
}


def rows(section):
    """Of a section's table: (globs, what, licences, where it ships)."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", files), *more) for files, *more in lines]


COPIES = rows("Copies")
NAMED = [glob for globs, *_ in COPIES for glob in globs]


def our_files():
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if not NOT_OURS & set(parts) and not any(part.endswith(("_cache", ".egg-info")) for part in parts):
            yield path.relative_to(ROOT).as_posix()


def is_named(path):
    return any(fnmatch(path, glob) for glob in NAMED)


def test_each_row_names_files_that_are_there():
    there = list(our_files())
    for section in ("Copies", "Facts with a source"):
        for globs, *_ in rows(section):
            for glob in globs:
                is_left_out = glob.startswith("measurements/") and not (ROOT / "measurements").exists()  # of an sdist
                assert is_left_out or any(fnmatch(path, glob) for path in there), glob


def test_what_is_vendored_or_an_asset_is_named():
    for path in our_files():
        is_copied = "vendor" in Path(path).parts[:-1] or ".min." in Path(path).name
        if is_copied and not path.endswith(".LICENSE"):
            assert is_named(path), path
        elif Path(path).suffix in ASSETS:
            assert is_named(path) or any(fnmatch(path, glob) for glob in WRITTEN_HERE), path


def test_licences_have_their_texts():
    said = {licence for _, _, licences, *_ in COPIES for licence in licences.split(", ")}
    assert said == LICENCES
    texts = {"Apache-2.0": ROOT / "LICENSE"}
    for licence in said - BY_LINK:
        text = texts.get(licence, ROOT / "LICENSES" / f"{licence}.txt").read_text(encoding="utf-8")
        assert len(text) > 500
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shipped = {each for _, _, licences, where in COPIES if "wheel" in where for each in licences.split(", ")}
    assert set(project["license"].split(" AND ")) == shipped | {"Apache-2.0"}


def licences_of(folder):
    return {each["licence"] for each in yaml.safe_load(folder.read_text(encoding="utf-8"))["sources"]}


@pytest.mark.skipif(not (ROOT / "measurements").exists(), reason="measurements are in the repository alone")
def test_measurements_are_named_with_the_licences_of_their_sources():
    folders = {path.parent.name: licences_of(path) for path in ROOT.glob("measurements/*/source.yaml")}
    named = {
        glob.split("/")[1]: set(licences.split(", "))
        for globs, _, licences, _ in COPIES
        for glob in globs
        if glob.startswith("measurements/")
    }
    assert named == folders


@pytest.mark.skipif(not (ROOT / "measurements").exists(), reason="measurements are in the repository alone")
def test_rows_that_the_package_carries_are_of_sources_with_a_licence():
    files = [path.name for path in (ROOT / "hardware_specs" / "validated").iterdir()]
    for name in files:
        known = [folder for start, folder in VALIDATED.items() if name.startswith(start)]
        if ".rows." in name:
            assert known, f"{name}: rows of whom?"
        for folder in known:
            path = f"hardware_specs/validated/{name}"
            ((licences,),) = [[said] for globs, _, said, _ in COPIES if any(fnmatch(path, glob) for glob in globs)]
            assert set(licences.split(", ")) <= licences_of(ROOT / "measurements" / folder / "source.yaml"), name


@pytest.mark.parametrize("path", sorted((ROOT / "workloads" / "traffic").glob("*.yaml")), ids=lambda path: path.stem)
def test_statistics_of_traces_are_named_with_what_their_sources_ask_for(path):
    facts = [(glob, said) for globs, _, said in rows("Facts with a source") for glob in globs]
    (said,) = {said for glob, said in facts if fnmatch(path.relative_to(ROOT).as_posix(), glob)}
    text = path.read_text(encoding="utf-8").replace("CC-BY 4.0", "CC-BY-4.0")
    assert [each for each in ("CC-BY-4.0", "Apache-2.0") if each in text] == [
        each for each in (said,) if "cited" not in each
    ]


def test_the_security_policy_says_how_and_what_and_invents_no_address():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for said in (
        "private vulnerability reporting",
        "loopback",
        "Host header",
        "token",
        "Files are data",
        "newest release",
    ):
        assert said in text
    assert "@" not in text
    assert "http" not in text
