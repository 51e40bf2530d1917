"""Do the tests know what each number means? Faults of meaning, written by hand, planted one at a time.

    python benchmarks/mutation/faults.py                                # all lists of `faults/`
    python benchmarks/mutation/faults.py --list benchmarks/mutation/faults/engine_sim.yaml --only autoscaler
    python benchmarks/mutation/faults.py --list ... --report reports/planted_faults_engine_sim_202611.md

A fault is a change that a reader overlooks: a sign, an off-by-one, a forgotten term, a swapped field, a wrong unit.
Each entry of a list has `module`, `law` (which law must notice), `before` (text that stands once in the module),
`after`, `test` (files or folders of tests of the module) and, if the fault lived when first tried, `first: lived`.
Faults are planted in a copy of the tree. The tests of an entry run until one fails, for at most `LIMIT_S` CPU seconds.
What was noticed is kept in `--state`, and is not tried again while it is there.
"""

import argparse
import ast
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from bugs import ROOT
from planting import NOT_RUN, compile_copy, copied, import_slow, in_child, planted, verdict

LISTS = Path(__file__).parent / "faults"
LIMIT_S, WORKERS = 120, 2


@dataclass(frozen=True)
class Fault:
    module: str
    law: str
    before: str
    after: str
    tests: tuple[str, ...]
    lived_first: bool

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.before, self.after

    @property
    def changed(self) -> bytes:
        return (ROOT / self.module).read_text("utf-8").replace(self.before, self.after).encode()

    @property
    def change(self) -> str:
        return " -> ".join(f"`{' '.join(text.split())}`" for text in (self.before, self.after))


@dataclass(frozen=True)
class Trial:
    fault: Fault
    lived: bool


def read_faults(path: Path) -> list[Fault]:
    """The faults of a list; SystemExit names the entries that no longer fit the tree."""
    faults, stale = [], []
    for row in yaml.safe_load(path.read_text("utf-8")):
        tests = [row["test"]] if isinstance(row["test"], str) else row["test"]
        first = row.get("first") == "lived"
        fault = Fault(row["module"], row["law"], str(row["before"]), str(row["after"]), tuple(tests), first)
        faults.append(fault)
        if wrong := _mismatch(fault):
            stale.append(f"{path.name}: {fault.module}: {fault.change}: {wrong}")
    if stale:
        raise SystemExit("\n".join(stale))
    return faults


def _mismatch(fault: Fault) -> str | None:
    if missing := [test for test in fault.tests if not (ROOT / test.split("::")[0]).exists()]:
        return f"got no test {', '.join(missing)}"
    count = (ROOT / fault.module).read_text("utf-8").count(fault.before) if (ROOT / fault.module).exists() else 0
    if count != 1:
        return f"got the text {count} times; expected it once"
    if fault.module.endswith(".py"):
        try:
            ast.parse(fault.changed)
        except SyntaxError as error:
            return f"the changed module is no Python: {error}"
    return None


def _own_copy() -> Path:
    """The copy of the tree of this worker, which it makes when it first needs it."""
    copy = Path(tempfile.gettempdir()) / f"worker-{os.getpid()}" / "tree"
    if not copy.exists():
        compile_copy(copied(copy))
    return copy


def _run_tests(copy: Path, tests: tuple[str, ...]) -> int:
    status = in_child(copy, ["-x", "-m", "not release", *tests], None, LIMIT_S)
    if status in NOT_RUN:
        raise RuntimeError(f"pytest found no such test: {', '.join(tests)}")
    return status


def _fail_without_fault(tests: list[str]) -> bool:
    return in_child(_own_copy(), ["-x", "-m", "not release", *tests], None, None) != 0


def _try_fault(fault: Fault) -> Trial:
    copy = _own_copy()
    status = planted(copy / fault.module, fault.changed, lambda: _run_tests(copy, fault.tests))
    return Trial(fault, verdict(status) == "survived")


def try_faults(faults: list[Fault], state: Path) -> list[Trial]:
    """All of `faults`, one at a time; those that `state` knows as noticed are taken from there."""
    import_slow()
    noticed = {tuple(json.loads(line)) for line in state.read_text("utf-8").splitlines()} if state.exists() else set()
    state.parent.mkdir(parents=True, exist_ok=True)
    lived: set[Fault] = set()
    with tempfile.TemporaryDirectory() as scratch, state.open("a", encoding="utf-8") as file:
        tempfile.tempdir = scratch
        with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
            for trial in pool.imap_unordered(_try_fault, [fault for fault in faults if fault.key not in noticed]):
                print(
                    f"{'LIVED' if trial.lived else 'noticed':<8} {trial.fault.module}: {trial.fault.change}", flush=True
                )
                if trial.lived:
                    lived.add(trial.fault)
                else:
                    file.write(json.dumps(trial.fault.key) + "\n")
                    file.flush()
            tests = sorted({test for fault in faults for test in fault.tests})
            is_failing = pool.apply(_fail_without_fault, (tests,))
    if is_failing:
        raise SystemExit(f"one of these tests fails without a fault: {' '.join(tests)}")
    return [Trial(fault, fault in lived) for fault in faults]


def table(trials: list[Trial]) -> list[str]:
    """By module: faults, those that lived when first tried, those that live now."""
    lines = ["| module | faults | lived at first | live now | noticed at first | noticed now |"]
    lines += ["|---|---|---|---|---|---|"]
    for module in [*sorted({trial.fault.module for trial in trials}), "all"]:
        rows = [trial for trial in trials if module in (trial.fault.module, "all")]
        first, now = sum(trial.fault.lived_first for trial in rows), sum(trial.lived for trial in rows)
        rates = [f"{1 - lived / len(rows):.0%}" for lived in (first, now)]
        lines.append("| " + " | ".join(map(str, (module, len(rows), first, now, *rates))) + " |")
    return lines


def report(name: str, trials: list[Trial]) -> str:
    """Markdown: the table by module, and the faults that lived, with the law that must notice each."""
    lines = [f"# Planted faults of meaning: {name}", ""]
    lines += [
        "`python benchmarks/mutation/faults.py` plants each fault of `benchmarks/mutation/faults/` in a copy of the"
    ]
    lines += ["tree and runs the tests of its module. Lived at first: before laws were written against it."]
    lines += ["", *table(trials), "", "## Faults that lived", "", "| module | change | which law must notice | now |"]
    lines += ["|---|---|---|---|"]
    for trial in trials:
        if trial.lived or trial.fault.lived_first:
            cells = (trial.fault.module, trial.fault.change, trial.fault.law, "**lives**" if trial.lived else "noticed")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, help="a list of faults (default: all of `faults/`)")
    parser.add_argument("--only", help="faults whose module, law or change has this text")
    parser.add_argument("--state", type=Path, default=ROOT / "out" / "faults.jsonl", help="what has been noticed")
    parser.add_argument("--report", type=Path, help="write the tables as Markdown")
    given = parser.parse_args()
    lists = [given.list] if given.list else sorted(LISTS.glob("*.yaml"))
    faults = [fault for path in lists for fault in read_faults(path)]
    if given.only:
        faults = [fault for fault in faults if given.only in f"{fault.module} {fault.law} {fault.change}"]
    trials = try_faults(faults, given.state)
    print("\n" + "\n".join(table(trials)))
    if given.report:
        given.report.write_text(report(" ".join(path.stem for path in lists), trials), encoding="utf-8")
    sys.exit(any(trial.lived for trial in trials))


if __name__ == "__main__":
    main()
