"""Whether the tests notice faults of meaning, written by hand and planted one at a time.

    python benchmarks/mutation/faults.py                                # all lists of `faults/`
    python benchmarks/mutation/faults.py --list benchmarks/mutation/faults/engine_sim.yaml --only autoscaler
    python benchmarks/mutation/faults.py --report reports/planted_faults_202611.md

A fault is a change that a reviewer overlooks: a sign, an off-by-one, a missing term, a swapped field, a wrong unit.
An entry of a list has `module`, `law` (which law must notice), `before` (text that occurs once in the module),
`after`, `test` (files or folders of tests of the module) and, if the fault survived its first trial, `first: lived`.
`equivalent` gives the reason why a change cannot be observed: the entry is listed, and not tried.
The tests of an entry run until one fails, for at most `LIMIT_S` CPU seconds, in forks of a process that has the package
imported and in which functions get their changed bodies. Faults that survive there, or are outside function bodies, are
planted in a file of a copy of the tree and imported again: "lived" is always the verdict of a file. Tests that noticed
must pass without the fault. Noticed faults are kept in `--state` and not retried.
"""

import argparse
import ast
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import yaml
from bugs import ROOT
from planting import (
    NOT_RUN,
    body_changes,
    compile_copy,
    copy_tree,
    import_package,
    import_slow,
    run_in_child,
    run_planted,
    verdict,
)

LISTS = Path(__file__).parent / "faults"
LIMIT_S = 120
ABOUT = """\
`python benchmarks/mutation/faults.py` plants the faults of `benchmarks/mutation/faults/` and runs the tests of their
modules. Lived at first: before a test was written against it. The `blind` lists were written at randomly drawn lines
(`blind_fourth`: in randomly drawn modules) without looking at their tests, so their first results measure how many
unforeseen faults the tests notice. The other lists were written together with the tests. `blind_third` and
`blind_fourth` were each tried after the tests of all earlier lists existed."""


@dataclass(frozen=True)
class Fault:
    module: str
    law: str
    before: str
    after: str
    tests: tuple[str, ...]
    lived_first: bool
    source: str  # the list
    equivalent: str = ""  # why no test can notice it

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.before, self.after

    def changed(self, tree: Path) -> bytes:
        return (tree / self.module).read_text("utf-8").replace(self.before, self.after).encode()

    @property
    def change(self) -> str:
        return " -> ".join(f"`{' '.join(text.split())}`" for text in (self.before, self.after))


@dataclass(frozen=True)
class Trial:
    fault: Fault
    lived: bool
    test: str = ""  # the test that noticed


def read_faults(paths: Iterable[Path]) -> list[Fault]:
    """The faults of lists; SystemExit names all entries that no longer match the tree."""
    faults, stale = [], []
    for path, row in [(file, row) for file in paths for row in yaml.safe_load(file.read_text("utf-8"))]:
        tests = [row["test"]] if isinstance(row["test"], str) else row["test"]
        first = row.get("first") == "lived"
        text = (row["module"], row["law"], str(row["before"]), str(row["after"]))
        fault = Fault(*text, tuple(tests), first, path.stem, row.get("equivalent", ""))
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
            ast.parse(fault.changed(ROOT))
        except SyntaxError as error:
            return f"the changed module is no Python: {error}"
    return None


class _Planter:
    """Pytest plugin in the child: replaces function bodies and records failed tests."""

    def __init__(self, changes: list[tuple[FunctionType, CodeType]]) -> None:
        self._changes = changes
        self.failed: list[str] = []

    def pytest_sessionstart(self) -> None:
        for function, code in self._changes:
            function.__code__ = code

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _run_tests(
    copy: Path, tests: list[str], changes: list[tuple[FunctionType, CodeType]], limit_s: int | None
) -> tuple[int, list[str]]:
    """The exit status of pytest, or minus a signal, and the failed tests."""
    planter, out = _Planter(changes), copy.parent / f"failed-{os.getpid()}"
    out.unlink(missing_ok=True)
    status = run_in_child(
        copy, ["-m", "release or not release", *tests], planter, limit_s, lambda: json.dumps(planter.failed), out
    )
    if status in NOT_RUN:
        raise RuntimeError(f"pytest collected no test: {', '.join(tests)}")
    return status, json.loads(out.read_text("utf-8")) if out.exists() else []


def _try(copy: Path, fault: Fault, changes: list[tuple[FunctionType, CodeType]]) -> Trial:
    status, failed = _run_tests(copy, ["-x", *fault.tests], changes, LIMIT_S)
    return Trial(fault, verdict(status) == "survived", failed[-1] if failed else "")


def _try_in_memory(fault: Fault) -> Trial:
    """Try on the package imported in this worker; a fault outside function bodies counts as survived."""
    copy = Path(tempfile.gettempdir()) / "tree"
    changes = body_changes(copy / fault.module, fault.changed(copy)) if fault.module.endswith(".py") else None
    return _try(copy, fault, changes) if changes else Trial(fault, True)


def _try_in_file(fault: Fault) -> Trial:
    """Try on a package imported again from this worker's copy: for constants, defaults and subprocesses."""
    copy = Path(tempfile.gettempdir()) / f"worker-{os.getpid()}" / "tree"
    if not copy.exists():
        compile_copy(copy_tree(copy))
    trials: list[Trial] = []

    def run() -> int:
        trials.append(_try(copy, fault, []))
        return 0

    run_planted(copy / fault.module, fault.changed(copy), run)
    return trials[0]


def _fail_without_fault(tests: list[str]) -> list[str]:
    return _run_tests(Path(tempfile.gettempdir()) / "tree", tests, [], None)[1]


def try_faults(faults: list[Fault], state: Path, num_workers: int) -> list[Trial]:
    """Try `faults` one at a time; those noticed according to `state` are not retried."""
    rows = [json.loads(line) for line in state.read_text("utf-8").splitlines()] if state.exists() else []
    noticed = {(module, before, after): test for module, before, after, test in rows}
    state.parent.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch, state.open("a", encoding="utf-8") as file:
        tempfile.tempdir = scratch
        tree = copy_tree(Path(scratch) / "tree")
        compile_copy(tree)
        import_slow()

        def keep(trial: Trial) -> None:
            if not trial.lived:
                noticed[trial.fault.key] = trial.test
                file.write(json.dumps([*trial.fault.key, trial.test]) + "\n")
                file.flush()
                print(
                    f"{'noticed' if trial.test else 'endless':<8} {trial.fault.module}: {trial.fault.change}",
                    flush=True,
                )

        with fork.Pool(num_workers, import_package, (tree,)) as pool:
            for trial in pool.imap_unordered(_try_in_memory, [fault for fault in faults if fault.key not in noticed]):
                keep(trial)
            tests = sorted({noticed[fault.key] for fault in faults if noticed.get(fault.key)})
            if tests and (failing := pool.apply(_fail_without_fault, (tests,))):
                raise SystemExit(
                    f"{state} lists these tests as noticing a fault, but they fail without one: {' '.join(failing)}"
                )
        with fork.Pool(num_workers) as pool:
            for trial in pool.imap_unordered(_try_in_file, [fault for fault in faults if fault.key not in noticed]):
                keep(trial)
                if trial.lived:
                    print(f"LIVED    {trial.fault.module}: {trial.fault.change}", flush=True)
    return [Trial(fault, fault.key not in noticed) for fault in faults]


def table(kind: str, trials: list[Trial], key: Callable[[Fault], str]) -> list[str]:
    """Counts grouped by `key`: faults, survivors of the first trial, survivors now."""
    lines = [f"| {kind} | faults | lived at first | live now | noticed at first | noticed now |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in [*sorted({key(trial.fault) for trial in trials}), "all"]:
        rows = [trial for trial in trials if name in (key(trial.fault), "all")]
        first, now = sum(trial.fault.lived_first for trial in rows), sum(trial.lived for trial in rows)
        rates = [f"{1 - lived / len(rows):.0%}" for lived in (first, now)]
        lines.append("| " + " | ".join(map(str, (name, len(rows), first, now, *rates))) + " |")
    return lines


def report(trials: list[Trial], equivalent: list[Fault]) -> str:
    """Markdown: tables by list, package and module, the survivors with their laws, and the equivalent changes."""
    lines = ["# Planted faults of meaning", "", ABOUT, ""]
    lines += table("list", trials, lambda fault: fault.source)
    lines += ["", *table("package", trials, lambda fault: "/".join(fault.module.split("/")[:2]))]
    lines += ["", *table("module", trials, lambda fault: fault.module)]
    lines += ["", "## Faults that lived", "", "| module | change | which law must notice | now |", "|---|---|---|---|"]
    for trial in trials:
        if trial.lived or trial.fault.lived_first:
            cells = (trial.fault.module, trial.fault.change, trial.fault.law, "**lives**" if trial.lived else "noticed")
            lines.append(_row(cells))
    lines += ["", "## Changes that make no difference", "", "Not counted above.", ""]
    lines += ["| module | change | why |", "|---|---|---|"]
    lines += [_row((fault.module, fault.change, fault.equivalent)) for fault in equivalent]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, help="a list of faults (default: all of `faults/`)")
    parser.add_argument("--only", help="faults with this text in their module, law or change")
    parser.add_argument("--state", type=Path, default=ROOT / "out" / "faults.jsonl", help="file of noticed faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", type=Path, help="write the tables as Markdown")
    given = parser.parse_args()
    lists = [given.list] if given.list else sorted(LISTS.glob("*.yaml"))
    faults = read_faults(lists)
    if given.only:
        faults = [fault for fault in faults if given.only in f"{fault.module} {fault.law} {fault.change}"]
    equivalent = [fault for fault in faults if fault.equivalent]
    faults = [fault for fault in faults if not fault.equivalent]
    trials = try_faults(faults, given.state.resolve(), given.workers)
    print("\n" + "\n".join(table("module", trials, lambda fault: fault.module)))
    if given.report:
        given.report.write_text(report(trials, equivalent), encoding="utf-8")
    sys.exit(any(trial.lived for trial in trials))


if __name__ == "__main__":
    main()
