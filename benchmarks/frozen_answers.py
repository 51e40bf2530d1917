"""Write the `--json` answers of all shipped scenarios, plans, what-ifs and studies, and compare two such folders.

    python benchmarks/frozen_answers.py write OUT [--tree TREE] [--only TEXT]
    python benchmarks/frozen_answers.py compare BEFORE AFTER

For changes of structure: the answers before and after must be equal, numbers to 1e-9 of their value. Written with
`--tree` they are those of another checkout, run by this interpreter. Predictions for measured rows are compared by
`benchmarks/accuracy_table.py`. `compare` prints every difference, at most eight for each command, and exits with 1.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TOLERANCE = 1e-9
_SHOWN = 8  # differences of one command
_FEW_REQUESTS = ["--set", "traffic.num_requests=300"]
_LONG = frozenset({"llama-3.1-70b-h100-disaggregated-fleet", "llama-3.1-8b-h100-fleet"})  # traffic of given duration
_WHATIFS = (
    ["llama-3.1-8b-a100", "--vary", "hardware=a100-sxm-80gb,h100-sxm", *_FEW_REQUESTS],
    ["mixtral-8x7b-a100-tp2", "--vary", "engine.max_num_seqs=32,256", *_FEW_REQUESTS],
    ["gpt-oss-120b-h100", "--vary", "traffic.arrivals.rate=1,4", *_FEW_REQUESTS],
    ["llama-3.1-8b-a100", *_FEW_REQUESTS],
)
_PLANS = (
    ["planning/chat-8b", "--set", "plan.max_gpus=4", "--set", "plan.seeds=1"],
    ["llama-3.1-8b-h100-fleet", "--set", "plan.seeds=1"],
    ["summaries-8b-offline"],
    ["qwen3-30b-a3b-h100", "--set", "plan.max_gpus=2", "--set", "plan.seeds=1"],
)
_STEPS = (["--batch", "64", "--context", "2000"], ["--prefill", "1024"])


def commands(tree: Path) -> Iterator[list[str]]:
    """The commands to ask, without `--json`."""
    scenarios = tree / "workloads/scenarios"
    for name in (file.stem for file in sorted(scenarios.glob("*.yaml"))):
        yield ["memory", name]
        yield ["explain", name]
        yield from (["explain", name, *step] for step in _STEPS)
        yield ["simulate", name, *([] if name in _LONG else _FEW_REQUESTS)]
    yield from (["whatif", *arguments] for arguments in _WHATIFS)
    yield from (["plan", *arguments] for arguments in _PLANS)
    yield from (["study", file.stem, "--quick"] for file in sorted((scenarios / "studies").glob("*.yaml")))
    yield from (["hardware", "show", name] for name in ("h100-sxm", "mi300x", "rtx-4090", "gb200-nvl72"))
    yield from (["models", "show", name] for name in ("llama-3.1-8b", "deepseek-v3", "gpt-oss-120b"))
    yield ["techniques"]


def answer(tree: Path, command: list[str]) -> dict[str, object]:
    """Exit status and parsed output of a command; the last line of its errors where it has none."""
    paths = os.pathsep.join((str(tree), str(tree / "executors")))
    done = subprocess.run(
        [sys.executable, "-m", "perfmodel", *command, "--json"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    output = json.loads(done.stdout) if done.stdout.strip() else done.stderr.strip().rpartition("\n")[2]
    return {"command": command, "status": done.returncode, "output": output}


def differences(before: object, after: object, path: str = "") -> Iterator[str]:
    """Where two parsed answers differ, as sentences."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in before or key not in after:
                yield f"{path}.{key}: only {'after' if key in after else 'before'}"
            else:
                yield from differences(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif isinstance(before, int | float) and isinstance(after, int | float):
        if not math.isclose(before, after, rel_tol=_TOLERANCE):
            yield f"{path}: {before!r} -> {after!r}"
    elif before != after:
        yield f"{path}: {str(before)[:100]!r} -> {str(after)[:100]!r}"


def _write(out: Path, tree: Path, only: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for command in commands(tree):
        text = " ".join(command)
        if only in text:
            name = "".join(letter if letter.isalnum() or letter in "-.=" else "_" for letter in text)
            result = answer(tree, command)
            (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8", newline="\n")
            print(f"{result['status']}  {text}", flush=True)


def _compare(before: Path, after: Path) -> int:
    names = sorted({file.name for folder in (before, after) for file in folder.glob("*.json")})
    num_different = 0
    for name in names:
        files = [folder / name for folder in (before, after)]
        if missing := [str(file) for file in files if not file.exists()]:
            texts = [f"not in {missing[0]}"]
        else:
            texts = list(differences(*(json.loads(file.read_text("utf-8")) for file in files)))
        if texts:
            num_different += 1
            more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
            print(f"{name}:\n  " + "\n  ".join(texts[:_SHOWN]) + more)
    print(f"{len(names) - num_different} of {len(names)} answers are equal.")
    return 1 if num_different or not names else 0


def main() -> int:
    """Write or compare, as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    write = modes.add_parser("write")
    write.add_argument("out", type=Path)
    write.add_argument("--tree", type=Path, default=ROOT)
    write.add_argument("--only", default="", help="commands that have this text")
    compare = modes.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.mode == "compare":
        return _compare(asked.before, asked.after)
    _write(asked.out, asked.tree.resolve(), asked.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
