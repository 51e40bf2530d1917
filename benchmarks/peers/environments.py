"""Peers in environments of their own under build/peers, and their answers, which are kept there."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PLACE = Path(__file__).resolve().parents[2] / "build" / "peers"


class Peer(NamedTuple):
    """A program to ask: `script` runs in an environment with `packages`, and with `alone`, whose own requirements are
    of what is not asked here."""

    name: str
    script: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return self.name.rpartition("-")[2]

    def python(self) -> Path:
        """The environment's interpreter; it is made if it is not there."""
        place = PLACE / self.name
        python = place / "bin" / "python"
        if not (place / "complete").exists():
            print(f"making {place} ...", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            for packages in (self.packages, ("--no-deps", *self.alone) if self.alone else ()):
                if packages:
                    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
            (place / "complete").touch()
        return python

    def answers(self, asked: Sequence[Any]) -> list[list[float] | str]:
        """Its answers to `asked`: figures, or why there are none. What it was asked before is not asked again."""
        store = PLACE / f"{self.name}.jsonl"
        keys = [json.dumps(question, sort_keys=True) for question in asked]
        known = dict[str, list[float] | str]()
        if store.exists():
            known = dict(json.loads(line) for line in store.read_text(encoding="utf-8").splitlines())
        unknown = [key for key in dict.fromkeys(keys) if key not in known]
        if unknown:
            command = [self.python(), Path(__file__).with_name(self.script)]
            questions = f"[{','.join(unknown)}]"
            with (
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
                store.open("a", encoding="utf-8") as file,
            ):
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(questions)
                process.stdin.close()
                for number, (key, line) in enumerate(zip(unknown, process.stdout, strict=False), 1):
                    known[key] = json.loads(line)
                    file.write(json.dumps([key, known[key]]) + "\n")
                    file.flush()
                    print(f"{self.name}: {number} of {len(unknown)} asked", file=sys.stderr, flush=True)
            if any(key not in known for key in unknown):
                raise SystemExit(f"{self.name} ended before it had answered all {len(unknown)} questions")
        return [known[key] for key in keys]
