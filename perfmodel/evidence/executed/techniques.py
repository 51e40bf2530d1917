"""`validate techniques`: each technique's speedup, simulated vs. executed on this CPU. A scenario with a `technique`
block and its baseline are calibrated on one step grid independent of their workloads, then simulated and executed."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, get_args

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.executed.bridge import Progress, load_executor
from perfmodel.evidence.executed.technique import Outcome, Technique, TechniqueRun, TechniqueVerdict
from perfmodel.evidence.observation import reported
from perfmodel.evidence.report import Comparison, Dimension, Rows, ValidationReport, about_of, pooled
from perfmodel.files.blocks import block_as
from perfmodel.files.sandbox import LARGEST_TABLE_BYTES, parse_json, read_limited_text
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario

Measure = Callable[[Scenario, Scenario, str, int], list[TechniqueRun]]
Judged = Callable[[TechniqueVerdict], None]


class Journal:
    """Results of finished pairs: from a report, and one per line from an interrupted run. A result counts only for the
    same file and number of runs; the line file is removed once the report is written. report: JSON whose pairs keep
    their dates; None or a missing file keeps nothing"""

    def __init__(self, report: Path | None) -> None:
        self._path = None if report is None else report.with_suffix(".partial.jsonl")
        rows = _rows_of(report) if report is not None else []
        if self._path is not None and self._path.is_file():
            for line in read_limited_text(self._path, LARGEST_TABLE_BYTES).splitlines():
                with suppress(ValueError, TypeError):  # the line that was being written when it was cut off
                    rows.append({**parse_json(line)})
        self._known: dict[str, dict[str, Any]] = {row["key"]: row for row in rows if "key" in row}

    def find(self, technique: Technique, key: str) -> TechniqueVerdict | None:
        """The pair's verdict, if it was finished."""
        row = self._known.get(key)
        return None if row is None else TechniqueVerdict.from_json(row, technique)

    def add(self, verdict: TechniqueVerdict) -> None:
        """Append a finished pair. Raises SpecError if the journal cannot be written."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8", newline="\n") as lines:
                lines.write(f"\n{json.dumps(verdict.to_json())}\n")  # after a cut-off line too, one of its own
        except OSError as error:
            raise SpecError(f"{self._path}: cannot be written: {error.strerror}.") from None

    def remove(self) -> None:
        """Delete the line file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _rows_of(report: Path) -> list[dict[str, Any]]:
    """The pairs of a report; empty for other files."""
    try:
        return list(parse_json(read_limited_text(report, LARGEST_TABLE_BYTES))["techniques"])
    except (OSError, PerfmodelError, ValueError, KeyError, TypeError):
        return []


def pair_key(file: Path, repeats: int) -> str:
    """Identifies a pair's runs: file contents and number of runs."""
    return hashlib.sha256(f"{file.read_text(encoding='utf-8')}\n{repeats}".encode()).hexdigest()


def validate_techniques(
    path: str | Path,
    repeats: int = 1,
    progress: Progress | None = None,
    measure: Measure = lambda *pair: load_executor().measure_technique(*pair),
    journal: Journal | None = None,
    judged: Judged | None = None,
) -> ValidationReport:
    """Simulate and execute the scenario of every `*.yaml` below `path` (or of one file) and its baseline.

    repeats: runs of each, simulated and executed
    measure: runs a pair; default: the executor
    journal: stores finished pairs, and has those of an interrupted session
    judged:  called with each pair's verdict

    Files that cannot be read or executed are listed with the reason. Raises SpecError if none can."""
    root = Path(path)
    if not root.exists():
        raise SpecError(f"validate techniques {root}: no such file or folder.")
    files = [root] if root.is_file() else sorted(root.rglob("*.yaml"))
    if not files:
        raise SpecError(f"validate techniques {root}: has no *.yaml; give a folder of scenarios with `technique`.")
    verdicts: list[TechniqueVerdict] = []
    reasons: list[str] = []
    for file in reported(files, len(files), progress):
        try:
            verdicts.append(_judge(file, repeats, measure, journal or Journal(None)))
        except PerfmodelError as error:
            reasons.append(f"not covered: {file.name}: {error}")
        else:
            if judged is not None:
                judged(verdicts[-1])
    if not verdicts:
        raise SpecError(reasons[0].removeprefix(f"not covered: {files[0].name}: "))
    comparison, note = speedups(sorted(verdicts, key=lambda item: item.technique.name))
    dates = sorted({item.date for item in verdicts})
    if len(dates) > 1:
        note += f" Pairs were run on {' and '.join(dates)}: a pair whose file has not changed keeps its runs."
    return ValidationReport(
        kind="techniques",
        rows=len(verdicts) + len(reasons),
        covered=len(verdicts),
        metrics=pooled([comparison]),
        worst=comparison.rows.worst("speedup", 5),
        notes=[note, *reasons],
        comparisons=[comparison],
        about=about_of("techniques"),
        techniques=[item.to_json() for item in sorted(verdicts, key=lambda item: item.technique.name)],
    )


def _judge(file: Path, repeats: int, measure: Measure, journal: Journal) -> TechniqueVerdict:
    scenario = load_scenario(file)
    technique = block_as(scenario.technique, Technique)
    if technique is None:
        raise SpecError(f"{file}: has no `technique` block; give its name, baseline and metric.")
    baseline = load_scenario(file, technique.baseline)
    key = pair_key(file, repeats)
    known = journal.find(technique, key)
    if known is not None:
        return known
    runs = measure(scenario, baseline, technique.metric, repeats)
    verdict = TechniqueVerdict.of(technique, file.name, runs, key, date.today().isoformat())
    journal.add(verdict)
    return verdict


def speedups(verdicts: Sequence[TechniqueVerdict]) -> tuple[Comparison, str]:
    """Simulated vs. executed speedups, a row per technique (medians over runs), and a sentence on the number right."""
    # executed = simulated / quotient, so that the row's error is that of the quotient, not one of two medians
    simulated, techniques = [item.simulated for item in verdicts], [item.technique.name for item in verdicts]
    rows = Rows(simulated, [item.simulated / item.quotient for item in verdicts], techniques, trivial=1.0)
    names = Dimension.of([item.technique.metric for item in verdicts])
    comparison = Comparison.of("speedup", rows, "times", {"metric": names})
    counts = Counter(item.outcome for item in verdicts)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in get_args(Outcome) if counts[name])
    sentence = f"{outcomes}; |quotient - 1| is {rows.stats().median_ape:.1%} in the median over {len(rows)} techniques."
    return comparison, sentence
