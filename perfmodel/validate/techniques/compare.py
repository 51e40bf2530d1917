"""`validate techniques`: what each technique gains, simulated beside executed on this machine's CPU.

Every scenario with a `technique` block is put beside its baseline; both are calibrated for together, on grids of steps
that their workloads do not decide, then simulated and executed. What is compared is the speedup.
"""

__all__ = ["report_techniques", "validate_techniques"]

from collections.abc import Callable, Sequence
from pathlib import Path

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.blocks import block_as
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.executed.bridge import measure_technique
from perfmodel.validate.groups import Comparison, Dimension, pooled
from perfmodel.validate.report import ValidationReport
from perfmodel.validate.rows import Rows
from perfmodel.validate.techniques.journal import Journal
from perfmodel.validate.techniques.runs import TechniqueRun, TechniqueVerdict
from perfmodel.validate.techniques.spec import Technique

Progress = Callable[[int, int | None], None]
Measure = Callable[[Scenario, Scenario, str, int], list[TechniqueRun]]
Judged = Callable[[TechniqueVerdict], None]

_ABOUT = (
    "Speedups of techniques over the same scenario without them, of whole served runs: simulated beside executed on "
    "this machine's CPU. For each technique one calibration was fitted here and now to the times of two grids of "
    "steps, with the technique and without, measured in turns; no step of the workloads was fitted to. Executed "
    "durations are thread CPU time at the speed that the machine had while calibrating."
)


def validate_techniques(
    path: str | Path,
    repeats: int = 1,
    progress: Progress | None = None,
    measure: Measure = measure_technique,
    journal: Journal | None = None,
    judged: Judged | None = None,
) -> ValidationReport:
    """Simulate and execute the scenario of every `*.yaml` below `path`, or of one file, and its baseline.

    repeats: runs of each, simulated and executed
    measure: what runs a pair
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
    return report_techniques(verdicts, reasons)


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


def report_techniques(verdicts: Sequence[TechniqueVerdict], reasons: Sequence[str] = ()) -> ValidationReport:
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
    error = f"|quotient - 1| is {rows.stats().median_ape:.1%} in the median over {len(rows)} techniques."
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
