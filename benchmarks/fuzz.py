"""Whether an input makes a command or server hang, run out of memory, or end in anything but an answer or a sentence.

    python benchmarks/fuzz.py [--cases 20000] [--kinds all|inputs|questions|ways-in|requests] [--first 0]
                              [--log FILE.jsonl] [--report MD]

Cases are drawn by hypothesis (tests/fuzz_cases.py), 250 to a seed, each seed in a process of its own with a gigabyte of
memory and 20 s of CPU time for a case (tests/fuzz_runs.py). Finished cases are in the log; an interrupted run resumes
there. Inputs are files of one scenario; questions are plans, what-ifs, studies and measurements; ways in are results of
load tests, command lines, conversations and checkpoints; requests go to the page and to the emulator. 20,000 of all
take an hour and a half on one core. Cases that failed once are in tests/data/fuzz_finds.jsonl, which `make test`
repeats.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
_PER_SEED = 250
_HUNG_S = 300.0  # of silence: a loop in C, which no alarm breaks into
_MAX_SHOWN = 20

Row = dict[str, Any]


def _run_seed(number: int, kinds: str, log: Path) -> None:
    """All cases of one seed, into the log; the one that runs is in a file, should it kill this process."""
    from fuzz_cases import FuzzCase, fuzz_cases
    from fuzz_runs import limit_memory, run_case
    from hypothesis import HealthCheck, Phase, given, seed, settings

    rows: list[Row] = []
    current = log.with_suffix(f".{number}.current")

    @seed(number)
    @settings(
        max_examples=_PER_SEED, phases=[Phase.generate], deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(fuzz_cases(kinds))
    def run(case: FuzzCase) -> None:
        shown = {"kind": case.kind, "args": case.args, "files": {k: v.decode("latin-1") for k, v in case.files.items()}}
        current.write_text(json.dumps(shown), encoding="utf-8")
        outcome = run_case(case)
        result: Row = {
            "seed": number,
            "kind": case.kind,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
        }
        rows.append(result | ({"wrong": outcome.wrong, "case": shown} if outcome.wrong else {}))

    limit_memory()
    run()
    with log.open("a", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(row) + "\n" for row in rows))
    current.unlink()


def _run_seeds(seeds: Sequence[int], kinds: str, log: Path) -> None:
    for done, number in enumerate(seeds, 1):
        begun = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=_run_seed, args=(number, kinds, log))
        process.start()
        current = log.with_suffix(f".{number}.current")
        while process.is_alive():
            process.join(1.0)
            seen = current.stat().st_mtime if current.exists() else time.time()
            if time.time() - seen > _HUNG_S:
                process.kill()
        if process.exitcode != 0:
            case = json.loads(current.read_text(encoding="utf-8")) if current.exists() else {}
            wrong = f"the process ended with {process.exitcode}"
            row = {
                "seed": number,
                "kind": case.get("kind", "?"),
                "status": -1,
                "seconds": 0,
                "wrong": wrong,
                "case": case,
            }
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
        print(f"seed {number}, {done} of {len(seeds)}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _read(log: Path) -> list[Row]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def _report(rows: Sequence[Row], first: int, command: str) -> str:
    kinds = sorted({row["kind"] for row in rows})
    lines = [
        "# Random inputs",
        "",
        f"`{command}`: {len(rows):,} cases from seed {first}, {sum(row['seconds'] for row in rows):,.0f} CPU s. Each "
        "had 20 s of CPU time and a gigabyte of memory. Right are an answer (exit status 0, and 1 of a plan; HTTP below"
        " 400) and a refusal in one sentence (exit status 2, HTTP 4xx).",
        "",
        "| input | cases | answered | refused | wrong | longest, CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for kind in [*kinds, "all"]:
        of_kind = [row for row in rows if kind in (row["kind"], "all")]
        wrong = [row for row in of_kind if "wrong" in row]
        right = Counter(row["status"] for row in of_kind if "wrong" not in row)
        longest = max((row["seconds"] for row in of_kind), default=0)
        refused = sum(count for status, count in right.items() if status == 2 or status >= 400)
        answered = len(of_kind) - len(wrong) - refused
        lines.append(f"| {kind} | {len(of_kind):,} | {answered:,} | {refused:,} | {len(wrong):,} | {longest:.1f} |")
    failures = Counter(row["wrong"][:160] for row in rows if "wrong" in row)
    lines += ["", "No case ended otherwise." if not failures else "What was wrong, and how often:", ""]
    lines += [f"- {count} x {what}" for what, count in failures.most_common(_MAX_SHOWN)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Run what the log does not have yet, and report on all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", choices=("all", "inputs", "questions", "ways-in", "requests"), default="all")
    parser.add_argument("--log", type=Path, default=Path("out/fuzz.jsonl"))
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    asked.log.parent.mkdir(parents=True, exist_ok=True)
    log = asked.log.resolve()
    known = {row["seed"] for row in _read(log)}
    seeds = range(asked.first, asked.first + -(-asked.cases // _PER_SEED))
    _run_seeds([number for number in seeds if number not in known], asked.kinds, log)
    text = _report(
        [row for row in _read(log) if row["seed"] in seeds],
        asked.first,
        f"python benchmarks/fuzz.py --cases {asked.cases} --kinds {asked.kinds}",
    )
    print(text)
    if asked.report is not None:
        asked.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
