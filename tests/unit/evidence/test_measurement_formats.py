"""docs/measurements.md beside the readers: its examples are read, and its tables name what a reader asks for."""

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence import observation
from perfmodel.evidence.sources import recorded as runs
from perfmodel.evidence.sources import steady as states

PAGE = (Path(__file__).parents[3] / "docs/measurements.md").read_text(encoding="utf-8")
Asked = set[str]


class Recorded(dict[str, Any]):
    """An object of a file that notes which of its keys were asked for."""

    def __init__(self, values: dict[str, Any], asked: Asked) -> None:
        super().__init__(values)
        self.asked = asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def recorded(found: Any, asked: Asked) -> Any:
    if isinstance(found, dict):
        return Recorded({key: recorded(value, asked) for key, value in found.items()}, asked)
    return [recorded(each, asked) for each in found] if isinstance(found, list) else found


def section(kind: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {kind}\n")[1], flags=re.MULTILINE)[0]


def blocks(kind: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(kind), re.DOTALL)


def documented(kind: str) -> dict[str, bool]:
    """The names of the section's tables, and whether each is required."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", section(kind), re.MULTILINE)
    return {name: missing.startswith("required") for name, missing in rows}


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def without(found: Any, name: str) -> Any:
    """The same without a key, wherever it stands."""
    if isinstance(found, dict):
        return {key: without(value, name) for key, value in found.items() if key != name}
    return [without(each, name) for each in found] if isinstance(found, list) else found


Read = Callable[[Any], Sequence[Any]]  # an example, as data -> the rows that were understood


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[dict[str, Read], Asked]:
    """By kind, the reader of an example; and all keys that readers asked for."""
    asked: Asked = set()
    served: dict[str, Any] = {}
    (tmp_path / "rtx4090-any" / "e2e").mkdir(parents=True)
    for module in (runs, observation):
        for name in ("read_json", "read_rows"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda path: recorded(served[Path(path).suffix], asked))

    def of_file(read: Callable[[Path], tuple[Sequence[Any], Sequence[Any]]], suffix: str) -> Read:
        def understood(example: Any) -> Sequence[Any]:
            served[suffix] = example
            return read(tmp_path / f"any{suffix}")[0]

        return understood

    def one_of_each_run(path: Path) -> tuple[Sequence[Any], Sequence[Any]]:
        stages, left_out = runs.read_serving_runs(path)
        return [stage for stage in stages if stage.window and stage.window[0] == 0], left_out

    def of_log(example: Any) -> Sequence[Any]:
        served[".json"], served[".csv"] = example
        return [runs.read_request_log(tmp_path / "rtx4090-any", tmp_path)]

    return (
        {
            "serving": of_file(one_of_each_run, ".json"),
            "per-request": of_log,
            "steady-state": of_file(states.read_steady_states, ".csv"),
            "throughput": of_file(runs.read_offline_runs, ".csv"),
        },
        asked,
    )


def examples(kind: str) -> list[Any]:
    tables, objects = [rows_of(text) for text in blocks(kind, "csv")], [json.loads(t) for t in blocks(kind, "json")]
    return [[objects[0], tables[0]]] if kind == "per-request" else tables or objects


KINDS = ("serving", "per-request", "steady-state", "throughput")


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_names_every_column_that_its_reader_asks_for_and_no_other(
    kind: str, readers: tuple[dict[str, Read], Asked]
) -> None:
    """Its examples are understood, row by row."""
    by_kind, asked = readers
    for example in examples(kind):
        assert len(by_kind[kind](example)) == (1 if kind == "per-request" else len(example))
    assert set(documented(kind)) == asked


def columns_of(found: Any) -> set[str]:
    if isinstance(found, dict):
        return set(found) | {name for value in found.values() for name in columns_of(value)}
    return {name for each in found for name in columns_of(each)} if isinstance(found, list) else set()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_without_what_the_page_calls_optional_and_left_out_without_the_rest(
    kind: str, readers: tuple[dict[str, Read], Asked]
) -> None:
    read = readers[0][kind]
    required = documented(kind)
    for example in examples(kind):
        for name in sorted(columns_of(example) & set(required)):
            if name in ("decode_num_workers", "prefill_num_workers", "batch_size"):
                continue  # without them the row is of another kind
            try:
                count = len(read(without(example, name)))
            except SpecError:
                count = 0
            assert (count == 0) is required[name], name


def test_a_log_whose_engine_is_not_described_is_refused_in_a_sentence(readers: tuple[dict[str, Read], Asked]) -> None:
    (example,) = examples("per-request")
    with pytest.raises(SpecError, match="engine_kwargs"):
        readers[0]["per-request"](without(example, "engine_kwargs"))


def test_a_run_that_was_not_measured_in_each_of_its_stages_is_left_out(readers: tuple[dict[str, Read], Asked]) -> None:
    (example,) = examples("serving")
    example[0]["measured"].pop()
    assert not readers[0]["serving"](example)
