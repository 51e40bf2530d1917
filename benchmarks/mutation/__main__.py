"""Do the tests notice? Small bugs, one at a time, in a copy of the tree, against the tests that run the bugged line.

    python benchmarks/mutation                                     # a sample of 150
    python benchmarks/mutation --report reports/mutation_202611.md # the table of what has been tried so far

Bugs are drawn by a fixed seed, as many from each room: another operator or comparison, a number one larger, a condition
turned round, an argument or branch swapped for its neighbour, a statement left out, a result lost. First all tests of
`tests/unit`, `tests/property` and `tests/analytic` run once, on a copy in which every line that is to be bugged says so
when it runs: which tests to ask about which bug, and how long they take. What runs on import (a constant, a default) is
looked for where its name is used. Then each bug is tried on those tests, the fastest first, until one fails or
`BUDGET_S` is spent; one that runs on for `LIMIT_S` is noticed, too. A run that was stopped goes on where it was. What
survives without changing anything stands with its reason in `explained.yaml`. Faults of meaning are written by hand:
`faults.py`.

Tools were looked at before this was written. mutmut 3.8 changes functions only, no constants, fields or defaults, and
all of a file, not a sample; cosmic-ray 8.7 runs one command for every bug, whatever line it is in, and draws no sample.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from bugs import ROOT, Bug, sample
from planting import NOT_RUN, compile_copy, copy_tree, import_slow, run_in_child, run_planted, verdict
from probes import Mapper, probe

SUBSET = ("tests/unit", "tests/property", "tests/analytic")
BUDGET_S, LIMIT_S = 25.0, 60
FOLDER = Path(__file__).parent


def try_bug(copy: Path, bug: Bug, tests: list[tuple[float, str]]) -> dict[str, Any]:
    """Whether one of the tests notices, and how many were asked."""
    path, asked, spent = copy / bug.path, [], 0.0
    for seconds, test in sorted(tests):
        if asked and spent + seconds > BUDGET_S:
            break
        asked.append(test)
        spent += seconds
    changed = bug.applied(path.read_bytes())
    status = run_planted(path, changed, lambda: run_in_child(copy, ["-x", *asked], None, LIMIT_S)) if asked else 0
    if status in NOT_RUN:
        raise SystemExit(f"pytest collected no test: {', '.join(asked)}")
    outcome = verdict(status) if asked else "not run"
    row = {"room": bug.room, "name": bug.name, "verdict": outcome, "asked": len(asked), "covering": len(tests)}
    return row | {"test": asked[0] if len(asked) == 1 and status else None}


def covering_tests(state: Path, bugs: list[Bug], scratch: Path) -> dict[str, list[tuple[float, str]]]:
    """(seconds, test) of those that run the line of each bug, from beside `state` if they are known."""
    known, names = state.with_suffix(".map.json"), [bug.name for bug in bugs]
    if not known.exists() or json.loads(known.read_text("utf-8"))["bugs"] != names:
        copy = copy_tree(scratch / "probed" / "tree")
        probe(copy, bugs)
        mapper = Mapper()
        run_in_child(
            copy, list(SUBSET), mapper, None, lambda: json.dumps({"bugs": names, "tests": mapper.found}), known
        )
    result: dict[str, list[tuple[float, str]]] = {name: [] for name in names}
    for test, (seconds, hits) in json.loads(known.read_text("utf-8"))["tests"].items():
        for number in hits:
            result[names[number]].append((seconds, test))
    return result


def run(state: Path) -> None:
    """Try what `state` has not, and add it."""
    import_slow()
    bugs = sample()
    state.parent.mkdir(parents=True, exist_ok=True)
    done = {row["name"] for row in tried(state)}
    with tempfile.TemporaryDirectory() as scratch:
        tests = covering_tests(state, bugs, Path(scratch))
        copy = copy_tree(Path(scratch) / "bugged" / "tree")
        compile_copy(copy)
        for bug in bugs:
            if bug.name not in done:
                row = try_bug(copy, bug, tests[bug.name])
                print(f"{row['verdict']:<8} {row['asked']:>3} tests  {bug.name}", flush=True)
                with state.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def tried(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in state.read_text("utf-8").splitlines()] if state.exists() else []


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown: noticed bugs by room, and survivors with their explanation from `explained.yaml`."""
    explained = yaml.safe_load((FOLDER / "explained.yaml").read_text("utf-8"))
    why: dict[str, str] = explained["survivors"]
    lost = [row for row in rows if row["verdict"] in ("survived", "not run")]
    lines = ["# Bugs put in on purpose: what the tests notice", "", explained["about"].strip(), ""]
    lines += ["| room | bugs | noticed at once | by slower tests | by laws since | equivalent | survive | noticed |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for room in [*dict.fromkeys(row["room"] for row in rows), "all"]:
        in_room = [row for row in rows if room in (row["room"], "all")]
        kinds = [why.get(row["name"], "survives").split(":")[0] for row in lost if room in (row["room"], "all")]
        slow, since, same = (kinds.count(kind) for kind in ("slower", "law", "equivalent"))
        num, noticed = len(in_room) - same, len(in_room) - len(kinds) + slow + since
        cells = [
            room,
            len(in_room),
            len(in_room) - len(kinds),
            slow,
            since,
            same,
            num - noticed,
            f"{noticed / num:.0%}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## Not noticed at once", ""]
    for row in lost:
        asked = f"{row['asked']} of {row['covering']} tests asked" if row["asked"] else "no test of the map runs it"
        lines.append(f"- {row['name']} ({asked}). {why.get(row['name'], 'survives: not explained.')}")
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
