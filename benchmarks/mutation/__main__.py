"""Do the tests notice? Small bugs, one at a time, in a copy of the tree, against the tests that run the bugged line.

    python benchmarks/mutation                                     # a sample of 150, then the bugs of `named.yaml`
    python benchmarks/mutation --report reports/mutation_202611.md # the table of what has been tried so far

Bugs are drawn by a fixed seed, as many from each room: another operator or comparison, a number one larger, a condition
turned round, an argument or branch swapped for its neighbour, a statement left out, a result lost. First all tests of
`tests/unit`, `tests/property` and `tests/analytic` run once, on a copy in which every line that is to be bugged says so
when it runs: which tests to ask about which bug, and how long they take. What runs on import (a constant, a default) is
looked for where its name is used. Then each bug is tried on those tests, the fastest first, until one fails or
`BUDGET_S` is spent; one that runs on for `LIMIT_S` is noticed, too. A run that was stopped goes on where it was. What
survives without changing anything stands with its reason in `explained.yaml`.

Tools were looked at before this was written. mutmut 3.8 changes functions only, no constants, fields or defaults, and
all of a file, not a sample; cosmic-ray 8.7 runs one command for every bug, whatever line it is in, and draws no sample.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bugs import ROOT, Bug, sample
from probes import Mapper, probe

SUBSET = ("tests/unit", "tests/property", "tests/analytic")
BUDGET_S, LIMIT_S = 25.0, 60
FOLDER = Path(__file__).parent


def in_child(
    copy: Path,
    arguments: list[str],
    plugin: Any,
    limit_s: int | None,
    result: Callable[[], str] | None = None,
    out: Path | None = None,
) -> int:
    """pytest in a child of this process, which has what takes long to import; its status, or minus a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.setsid()
    os.chdir(copy)
    if limit_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 * limit_s)  # of those that sleep, or wait for a child of their own
    folders = [str(copy), str(copy / "executors")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(folders), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = folders
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    status = int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin] if plugin else []))
    if out is not None and result is not None:
        out.write_text(result(), encoding="utf-8")
    os._exit(status)


def copied(folder: Path) -> Path:
    """The tree as it is, what git ignores left out."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    os.symlink(ROOT.parent / "shared", folder.parent / "shared")
    return folder


def try_bug(copy: Path, bug: Bug, tests: list[tuple[float, str]]) -> dict[str, Any]:
    """Whether one of the tests notices, and how many were asked."""
    path, asked, spent = copy / bug.path, [], 0.0
    for seconds, test in sorted(tests):
        if asked and spent + seconds > BUDGET_S:
            break
        asked.append(test)
        spent += seconds
    status = 0
    if asked:
        good = path.read_bytes()
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_bytes(bug.applied(good))
        status = in_child(copy, ["-x", *asked], None, LIMIT_S)
        path.write_bytes(good)
    if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest found no such test: {', '.join(asked)}")
    verdict = "not run" if not asked else "survived" if status == 0 else "killed" if status > 0 else "endless"
    found = {"room": bug.room, "name": bug.name, "verdict": verdict, "asked": len(asked), "covering": len(tests)}
    return found | {"test": asked[0] if len(asked) == 1 and status else None}


def covering_tests(state: Path, bugs: list[Bug], scratch: Path) -> dict[str, list[tuple[float, str]]]:
    """(seconds, test) of those that run the line of each bug, from beside `state` if they are known."""
    known, names = state.with_suffix(".map.json"), [bug.name for bug in bugs]
    if not known.exists() or json.loads(known.read_text("utf-8"))["bugs"] != names:
        copy = copied(scratch / "probed" / "tree")
        probe(copy, bugs)
        mapper = Mapper()
        in_child(copy, list(SUBSET), mapper, None, lambda: json.dumps({"bugs": names, "tests": mapper.found}), known)
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in names}
    for test, (seconds, hits) in json.loads(known.read_text("utf-8"))["tests"].items():
        for number in hits:
            found[names[number]].append((seconds, test))
    return found


def named() -> Iterator[tuple[Bug, list[tuple[float, str]]]]:
    """Bugs that got past the tests once, in each file that has the text, and the tests that are to notice them now."""
    sources = {path: path.read_text("utf-8") for path in sorted((ROOT / "perfmodel").rglob("*.py"))}
    for row in yaml.safe_load((FOLDER / "named.yaml").read_text("utf-8")):
        before = row["before"]
        found = [path for path, source in sources.items() if before in source]
        if not found:
            raise SystemExit(f"`{before}` is in no file any more: bring named.yaml up to date")
        for path in found:
            head, place = sources[path].partition(before)[0], before.encode().rsplit(b"\n", 1)
            line, column = head.count("\n") + 1, len(head.encode().rsplit(b"\n", 1)[-1])
            end = line + before.count("\n"), len(place[-1]) + (column if len(place) == 1 else 0)
            name = str(path.relative_to(ROOT))
            yield Bug(f"named: {row['bug']}", name, line, column, *end, before, row["after"]), [(0.0, row["test"])]


def run(state: Path) -> None:
    """Try what `state` has not, and add it."""
    for name in ("numpy", "scipy.special", "scipy.optimize", "pydantic", "simpy", "typer", "rich", "hypothesis"):
        __import__(name)
    bugs = sample()
    state.parent.mkdir(parents=True, exist_ok=True)
    done = {row["name"] for row in tried(state)}
    with tempfile.TemporaryDirectory() as scratch:
        tests = covering_tests(state, bugs, Path(scratch))
        copy = copied(Path(scratch) / "bugged" / "tree")
        subprocess.run([sys.executable, "-m", "compileall", "-q", "perfmodel", "tests"], cwd=copy, check=False)
        for bug, asked in [*((bug, tests[bug.name]) for bug in bugs), *named()]:
            if bug.name not in done:
                found = try_bug(copy, bug, asked)
                print(f"{found['verdict']:<8} {found['asked']:>3} tests  {bug.name}", flush=True)
                with state.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")


def tried(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in state.read_text("utf-8").splitlines()] if state.exists() else []


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown: what was noticed by room, each survivor with what `explained.yaml` says of it, the named bugs."""
    explained = yaml.safe_load((FOLDER / "explained.yaml").read_text("utf-8"))
    why: dict[str, str] = explained["survivors"]
    drawn = [row for row in rows if not row["room"].startswith("named: ")]
    lost = [row for row in drawn if row["verdict"] in ("survived", "not run")]
    lines = ["# Bugs put in on purpose: what the tests notice", "", explained["about"].strip(), ""]
    lines += ["| room | bugs | noticed at once | by slower tests | by laws since | equivalent | survive | noticed |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for room in [*dict.fromkeys(row["room"] for row in drawn), "all"]:
        mine = [row for row in drawn if room in (row["room"], "all")]
        kinds = [why.get(row["name"], "survives").split(":")[0] for row in lost if room in (row["room"], "all")]
        slow, since, same = (kinds.count(kind) for kind in ("slower", "law", "equivalent"))
        num, noticed = len(mine) - same, len(mine) - len(kinds) + slow + since
        cells = [room, len(mine), len(mine) - len(kinds), slow, since, same, num - noticed, f"{noticed / num:.0%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## Not noticed at once", ""]
    for row in lost:
        asked = f"{row['asked']} of {row['covering']} tests asked" if row["asked"] else "no test of the map runs it"
        lines.append(f"- {row['name']} ({asked}). {why.get(row['name'], 'survives: not explained.')}")
    lines += ["", "## Bugs that got past the tests once", "", "| bug | put in | noticed by |", "|---|---|---|"]
    for row in rows:
        if row["room"].startswith("named: "):
            place = row["name"].replace("|", "\\|")
            lines.append(f"| {row['room'].removeprefix('named: ')} | {place} | {row['test'] or '**nobody**'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=ROOT / "out" / "mutation.jsonl", help="what has been tried")
    parser.add_argument("--report", type=Path, help="write the table of what has been tried, and try nothing")
    given = parser.parse_args()
    if given.report:
        given.report.write_text(report(tried(given.state)), encoding="utf-8")
    else:
        run(given.state.resolve())


if __name__ == "__main__":
    main()
