"""Whether a command killed at a random moment and restarted gives the result of an uninterrupted run.

    python benchmarks/kill_and_resume.py [--kills 50] [--seed 0] [--report MD]

`plan` resumes from its store, `study` and `execute` start over; all overwrite the files of a killed run. A process
group gets SIGKILL at a moment drawn uniformly from the duration of an uninterrupted run; runs that end earlier do not
count. Then the same command runs to completion in the same folder. Compared byte for byte: exit status, stdout
and every file, except the store, and except measured times of `execute` (all requests arrive at once, so that its
step plans do not depend on times). Processes are forked from one that has run the commands, so that kills hit
their work, not their imports. POSIX; ten minutes.
"""

import argparse
import csv
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "executors")]
_MAX_TRIES = 5  # to hit a running process, since durations vary
_SHORT = "{arrivals: {rate: 20}, num_requests: 60, input_tokens: {distribution: fixed, value: 300}, output_tokens: {distribution: fixed, value: 60}}"  # noqa: E501
_BASE = f"{{model: llama-3.1-8b, hardware: h100-sxm-80gb, traffic: {_SHORT}}}"
_FILES = {
    "plan.yaml": f"""model: llama-3.1-8b
hardware: h100-sxm-80gb
traffic: {_SHORT}
slo: {{ttft_ms: 2000, tpot_ms: 100}}
plan: {{finalists: 1, seeds: 2, num_requests: 60, max_gpus: 1, space: {{tensor_parallel_size: [1],
  max_num_seqs: [16, 64], max_num_batched_tokens: [2048]}}}}
""",
    "study.yaml": f"""study: short
question: Does the batch matter?
base: {_BASE}
variants: {{small: {{engine.max_num_seqs: 4}}, large: {{engine.max_num_seqs: 64}}}}
baseline: small
axes: {{rate: {{field: traffic.arrivals.rate, values: [5, 20], unit: req/s}}}}
metrics: [output_throughput, mean_e2el_ms]
""",
}
COMMANDS = {
    "plan": ("plan", "plan.yaml", "--json", "--store", "points.sqlite", "--export", "out"),
    "study": ("study", "study.yaml", "--json", "--report", "study.md"),
    "execute": (
        *("execute", "tiny-llama-cpu", "--json", "--out", "run", "--set", "traffic.arrivals={process: burst}"),
        *("--set", "traffic.num_requests=4", "--set", "traffic.input_tokens={distribution: fixed, value: 16}"),
        *("--set", "traffic.output_tokens={distribution: fixed, value: 8}"),
    ),
}
_RECORDS = ("run/requests.csv", "run/steps.csv")  # columns of times end with _s


@dataclass
class Tally:
    """The kills of one command and their outcomes."""

    kills: int = 0
    too_late: int = 0
    resumed_points: int = 0
    wrong: list[str] = field(default_factory=list)


def start(command: str, folder: Path) -> int:
    """Start the command in the folder as the leader of a new process group; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        for name, stream in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(f"../{folder.name}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        from perfmodel.cli import app

        app(list(COMMANDS[command]), standalone_mode=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def finish(command: str, folder: Path) -> tuple[dict[str, bytes], float]:
    """Run the command to completion: its outputs and its duration in seconds."""
    started = time.monotonic()
    _, status = os.waitpid(start(command, folder), 0)
    return contents(folder) | {"status": str(os.waitstatus_to_exitcode(status)).encode()}, time.monotonic() - started


def contents(folder: Path) -> dict[str, bytes]:
    """All outputs of a command by name, without measured times."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.startswith("points.sqlite"):
            files[str(file.relative_to(folder))] = file.read_bytes()
    files["stdout"] = folder.with_name(f"{folder.name}.stdout").read_bytes()
    if "run/requests.csv" in files:
        timeless = {name: _without_times(files[name]) for name in _RECORDS}
        printed = json.loads(files["stdout"])
        counts = {name: value for name, value in printed.items() if name.startswith("num_")}
        files = dict.fromkeys(files, b"") | timeless | {"stdout": json.dumps(counts).encode()}
    return files


def _without_times(raw: bytes) -> bytes:
    rows = csv.DictReader(io.StringIO(raw.decode()))
    return json.dumps([{key: row[key] for key in row if not key.endswith("_s")} for row in rows]).encode()


def kill(command: str, folder: Path, after_s: float) -> bool:
    """Start the command and kill its group after `after_s`. False if it ended earlier."""
    pid, end = start(command, folder), time.monotonic() + after_s
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(min(0.002, max(end - time.monotonic(), 0)))
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # the group does not exist yet
        os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def run(num_kills: int, seed: int, commands: tuple[str, ...] = tuple(COMMANDS)) -> dict[str, Tally]:
    """`num_kills` kills, over the commands in turn."""
    draw, tallies = random.Random(seed), {command: Tally() for command in commands}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _warm_up(root, commands)
        reference, durations_s = {}, {}
        for command in commands:
            reference[command], durations_s[command] = finish(command, _folder(root, f"{command}-whole"))
        for number, command in zip(range(num_kills), cycle(commands), strict=False):
            tally = tallies[command]
            for attempt in range(_MAX_TRIES):
                folder = _folder(root, f"{command}-{number}-{attempt}")
                moment = draw.uniform(0, durations_s[command])
                if kill(command, folder, moment):
                    break
                tally.too_late += 1
                durations_s[command] *= 0.8  # runs have become faster
            else:
                raise SystemExit(f"{command}: ended before all {_MAX_TRIES} kills")
            tally.kills += 1
            tally.resumed_points += (folder / "points.sqlite").exists()
            resumed, _ = finish(command, folder)
            differing = sorted(
                key
                for key in resumed.keys() | reference[command].keys()
                if resumed.get(key) != reference[command].get(key)
            )
            if differing:
                tally.wrong.append(f"killed after {moment:.2f} s: {', '.join(differing)} differ")
            outcome = f"{moment:.2f} of {durations_s[command]:.2f} s: {differing or 'equal'}"
            print(f"{number + 1} of {num_kills}: {command}, {outcome}", file=sys.stderr, flush=True)
    return tallies


def _folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir()
    for file, text in _FILES.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def _warm_up(root: Path, commands: tuple[str, ...]) -> None:
    """Run the commands once, so that forked processes inherit their imports and caches."""
    from typer.testing import CliRunner

    from perfmodel.cli import app

    before = Path.cwd()
    for command in commands:
        os.chdir(_folder(root, f"{command}-warm"))
        answer = CliRunner().invoke(app, list(COMMANDS[command]))
        assert answer.exit_code == 0, answer.output
        print(f"{command}: warm", file=sys.stderr)
    os.chdir(before)


def main() -> None:
    """Kill, resume, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    tallies = run(asked.kills, asked.seed)
    lines = [
        "# Killed and resumed",
        "",
        f"`python benchmarks/kill_and_resume.py --kills {asked.kills} --seed {asked.seed}`: SIGKILL at a random moment,"
        " then the same command once more, compared byte for byte with an uninterrupted run.",
        "",
        "| command | kills | with points in the store | over before the kill, drawn again | answers that differ |",
        "|---|---|---|---|---|",
    ]
    for command, tally in tallies.items():
        points = tally.resumed_points if command == "plan" else "-"
        lines.append(f"| {command} | {tally.kills} | {points} | {tally.too_late} | {len(tally.wrong)} |")
    lines += ["", *(f"- {command}: {what}" for command, tally in tallies.items() for what in tally.wrong)]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if asked.report is not None:
        asked.report.write_text(text, encoding="utf-8")
    raise SystemExit(any(tally.wrong for tally in tallies.values()))


if __name__ == "__main__":
    main()
