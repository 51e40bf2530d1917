"""`validate techniques`: what each technique gains, simulated beside executed on this machine's CPU.

Every scenario with a `technique` block is put beside its baseline; both are calibrated for together, on grids of steps
that their workloads do not decide, then simulated and executed. What is compared is the speedup.
"""

__all__ = ["Journal", "validate_techniques"]

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.blocks import block_as
from perfmodel.files.bounded import LARGEST_TABLE_BYTES, parse_json, read_bounded_text
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.executed.bridge import load_executor
from perfmodel.validate.report import Comparison, Dimension, Rows, ValidationReport, pooled
from perfmodel.validate.techniques.runs import Outcome, Technique, TechniqueRun, TechniqueVerdict

Progress = Callable[[int, int | None], None]
Measure = Callable[[Scenario, Scenario, str, int], list[TechniqueRun]]
Judged = Callable[[TechniqueVerdict], None]

_ABOUT = (
    "Speedups of techniques over the same scenario without them, of whole served runs: simulated beside executed on "
    "this machine's CPU. What is compared is the composition: for each technique one calibration was fitted here and "
    "now to the times of two grids of steps, with the technique and without, measured in turns, so that the technique's "
    "own kernels were seen, and no step of the workloads was. Executed durations are thread CPU time at the speed that "
    "the machine had while calibrating."
)


class Journal:
    """The pairs that are finished, one line each, so that a session of most of an hour that is cut off goes on.

    A line is taken up again only if both scenarios and the number of runs are what they were; the file is removed once
    the report is written.

    path: the file of lines; None keeps nothing
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[TechniqueRun]] = {}
        if path is not None and path.is_file():
            for line in read_bounded_text(path, LARGEST_TABLE_BYTES).splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            row = parse_json(line)
            self._known[row["key"]] = [TechniqueRun.from_json(run) for run in row["runs"]]
        except (ValueError, KeyError, TypeError):
            pass  # the line that was being written when it was cut off

    def find(self, scenario: Scenario, baseline: Scenario, repeats: int) -> list[TechniqueRun] | None:
        """The runs of this pair, if it was finished."""
        return self._known.get(_key(scenario, baseline, repeats))

    def add(self, file: str, scenario: Scenario, baseline: Scenario, runs: list[TechniqueRun]) -> None:
        """Append the finished pair of `scenario` (of `file`) and `baseline`, with its `runs`.

        Raises SpecError if the journal cannot be written.
        """
        if self._path is None:
            return
        key = _key(scenario, baseline, len(runs))
        line = json.dumps({"file": file, "key": key, "runs": [run.to_json() for run in runs]})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(f"\n{line}\n")  # after a cut-off line too, one of its own
        except OSError as error:
            raise SpecError(f"{self._path}: cannot be written: {error.strerror}.") from None

    def remove(self) -> None:
        """Forget everything: the report is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _key(scenario: Scenario, baseline: Scenario, repeats: int) -> str:
    text = "\n".join((scenario.model_dump_json(), baseline.model_dump_json(), str(repeats)))
    return hashlib.sha256(text.encode()).hexdigest()


def validate_techniques(
    path: str | Path,
    repeats: int = 1,
    progress: Progress | None = None,
    measure: Measure = lambda *pair: load_executor().measure_technique(*pair),
    journal: Journal | None = None,
    judged: Judged | None = None,
) -> ValidationReport:
    """Simulate and execute the scenario of every `*.yaml` below `path`, or of one file, and its baseline.

    repeats: runs of each, simulated and executed
    measure: what runs a pair; the executor unless given
    journal: stores each finished pair, and has those of an interrupted session
    judged:  called with each pair's verdict

    Files that cannot be read or executed are listed with the reason. Raises SpecError where that goes for all.
    """
    files = _files(Path(path))
    verdicts: list[TechniqueVerdict] = []
    reasons: list[str] = []
    for done, file in enumerate(files, 1):
        try:
            verdicts.append(_judge(file, repeats, measure, journal or Journal(None)))
        except PerfmodelError as error:
            reasons.append(f"not covered: {file.name}: {error}")
        else:
            if judged is not None:
                judged(verdicts[-1])
        if progress is not None:
            progress(done, len(files))
    if not verdicts:
        raise SpecError(reasons[0].removeprefix(f"not covered: {files[0].name}: "))
    return _report_techniques(verdicts, reasons)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise SpecError(f"validate techniques {path}: no such file or folder.")
    files = [path] if path.is_file() else sorted(path.rglob("*.yaml"))
    if not files:
        raise SpecError(f"validate techniques {path}: found no *.yaml; give a folder of scenarios with `technique`.")
    return files


def _judge(file: Path, repeats: int, measure: Measure, journal: Journal) -> TechniqueVerdict:
    scenario = load_scenario(file)
    technique = block_as(scenario.technique, Technique)
    if technique is None:
        raise SpecError(f"{file}: found no `technique` block; give its name, baseline and metric.")
    baseline = load_scenario(file, technique.baseline)
    runs = journal.find(scenario, baseline, repeats)
    if runs is None:
        runs = measure(scenario, baseline, technique.metric, repeats)
        journal.add(file.name, scenario, baseline, runs)
    return TechniqueVerdict(technique, file.name, runs)


def _report_techniques(verdicts: Sequence[TechniqueVerdict], reasons: Sequence[str] = ()) -> ValidationReport:
    """The report: one row for each technique, the medians over its runs; all quotients are in its JSON."""
    ordered = sorted(verdicts, key=lambda each: each.technique.name)
    # executed = simulated / quotient, so that the row's error is that of the quotient, not one of two medians
    rows = Rows(
        [each.simulated for each in ordered],
        [each.simulated / each.quotient for each in ordered],
        [each.technique.name for each in ordered],
    )
    names = Dimension.of([each.technique.metric for each in ordered])
    comparison = Comparison.of("speedup", rows, "times", {"metric": names})
    counts = Counter(each.outcome for each in ordered)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in get_args(Outcome) if counts[name])
    error = f"{outcomes}; |quotient - 1| is {rows.stats().median_ape:.1%} in the median over {len(rows)} techniques."
    return ValidationReport(
        kind="techniques",
        rows=len(verdicts) + len(reasons),
        covered=len(verdicts),
        metrics=pooled([comparison]),
        worst=rows.worst("speedup", 5),
        notes=[error, *reasons],
        comparisons=[comparison],
        about=_ABOUT,
        techniques=[each.to_json() for each in ordered],
    )
