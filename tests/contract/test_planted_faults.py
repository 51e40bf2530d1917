"""The lists of planted faults match the tree: an entry that does not can no longer be tried."""

import importlib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lists(monkeypatch):
    """`benchmarks/mutation/faults.py`"""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "mutation")
    return importlib.import_module("faults")


def test_every_planted_fault_changes_one_place_of_its_module(lists):
    """Else `SystemExit` names the entries."""
    assert lists.read_faults(sorted(lists.LISTS.glob("*.yaml")))


def test_the_entries_of_all_lists_that_do_not_match_are_named_at_once(lists, tmp_path):
    module, tests = tmp_path / "module.py", "tests/contract"
    module.write_text("total = first + first\nmean = total / count\n", encoding="utf-8")
    entries = {
        "match": (module, "total /", "total *", tests),
        "gone": (module, "maximum", "minimum", tests),
        "twice": (module, "first", "last", tests),
        "moved": (tmp_path / "gone.py", "total /", "total *", tests),
        "untested": (module, "total /", "total *", str(tmp_path / "test_gone.py")),
        "broken": (module, "total /", "total / /", tests),
    }
    for name, (path, *entry) in entries.items():
        row = dict(zip(("before", "after", "test"), entry, strict=True), module=str(path), law=name)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump([row]), encoding="utf-8")
    with pytest.raises(SystemExit) as error:
        lists.read_faults(sorted(tmp_path.glob("*.yaml")))
    assert [line.split(".yaml")[0] for line in str(error.value).splitlines()] == sorted(entries.keys() - {"match"})
