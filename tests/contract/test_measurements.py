"""`measurements/`: whose figures they are, under which licence, how large, and that the cited files give them again."""

import csv
import gzip
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "measurements"
CITED = Path(os.environ.get("PERFMODEL_SHARED", ROOT.parent / "shared")) / "truth"
MAX_BYTES = 12_000_000  # eight of them decisions of engines' schedulers
_spec = importlib.util.spec_from_file_location("write_measurements", ROOT / "benchmarks/write_measurements.py")
assert _spec is not None
assert _spec.loader is not None
writing = importlib.util.module_from_spec(_spec)
sys.modules["write_measurements"] = writing
_spec.loader.exec_module(writing)

FOLDERS = sorted(folder for folder in MEASUREMENTS.iterdir() if folder.is_dir())
TABLES = sorted(file for folder in FOLDERS for file in folder.rglob("*") if file.name.endswith((".csv", ".csv.gz")))


def rows_of(file: Path) -> list[dict[str, str]]:
    raw = file.read_bytes()
    text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
    return list(csv.DictReader(text.splitlines()))


def sources_of(folder: Path) -> list[dict]:
    return yaml.safe_load((folder / "source.yaml").read_text(encoding="utf-8"))["sources"]


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for file in MEASUREMENTS.rglob("*") if file.is_file()) < MAX_BYTES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_folder_names_sources_that_allow_altered_copies(folder) -> None:
    about = yaml.safe_load((folder / "source.yaml").read_text(encoding="utf-8"))
    assert about["what"]
    assert about["changes"]
    for source in about["sources"]:
        assert source["licence"] in writing.ALLOWED
        assert source["url"].startswith("https://")
        assert source["commit"]


@pytest.mark.parametrize("file", TABLES, ids=lambda file: str(file.relative_to(MEASUREMENTS)))
def test_each_row_is_of_a_source_that_its_folder_names(file) -> None:
    """Where rows have a source and a licence of their own, these are the folder's."""
    rows = rows_of(file)
    assert rows
    licences = {
        source["name"]: source["licence"]
        for source in sources_of(MEASUREMENTS / file.relative_to(MEASUREMENTS).parts[0])
    }
    for row in rows:
        if "licence" in row:
            assert writing.is_allowed(row)
            assert row["licence"].partition(" (")[0] == licences[row["source"]]


def test_results_of_mlperf_are_named_by_their_ids_and_cited() -> None:
    folder = MEASUREMENTS / "mlperf"
    rows = rows_of(folder / "results.csv.gz")
    named = {name for source in sources_of(folder) for name in source.get("results", ())}
    assert named == {row["mlperf_id"] for row in rows if row["mlperf_id"]}
    assert all(row["mlperf_id"] or row["log_path"] for row in rows)
    citation = yaml.safe_load((folder / "source.yaml").read_text(encoding="utf-8"))["citation"]
    assert "trademarks of MLCommons Association" in citation


@pytest.mark.skipif(not CITED.is_dir(), reason="the cited files are not beside this checkout")
def test_the_cited_files_give_them_again() -> None:
    """Of the cited tables those that are kept, all but kernel tables of some size, which take long to be read; and
    nothing is kept that is not written from them, but for decisions and logs that were read for this project."""
    written = set()
    for table in writing.TABLES:
        for file in sorted(CITED.glob(table.cited)):
            target = MEASUREMENTS / writing.target(table, file, CITED)
            if not target.exists():
                continue
            written.add(target)
            if file.suffix != ".parquet" or file.stat().st_size < 30_000:
                raw = target.read_bytes()
                assert (gzip.decompress(raw) if target.suffix == ".gz" else raw) == writing.written_table(table, file)
    recorded = ("adapters", "engine-counts", "front-end", "plans", "surface")
    cited = [folder for folder in FOLDERS if folder.name not in recorded]
    ours = ("source.yaml", "domains.csv")  # the second: read from pages for this project
    kept = {file for folder in cited for file in folder.rglob("*") if file.is_file() and file.name not in ours}
    assert kept == written


def test_rows_without_a_licence_that_allows_it_stay_where_they_are() -> None:
    for licence in ("none stated (facts cited)", "CC-BY-ND-4.0 (facts cited)", "", "MITX"):
        assert not writing.is_allowed({"licence": licence})
    assert writing.is_allowed({"licence": "Apache-2.0 (repo LICENSE)"})
