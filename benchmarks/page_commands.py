"""The commands that README.md, CONTRIBUTING.md and docs/ give, run as they are written there.

    python benchmarks/page_commands.py [--with-torch] [PAGE ...]

Commands stand in blocks of bash, behind `$`, indented, or in backticks in the prose. Those of one page run one after
the other in one folder, which has the repository's data beside it and a file for each name that stands for one of the
reader's own (my.yaml). What only names a command (`perfmodel plan SCENARIO`) is no command to run. About an hour on one
core; `tests/contract/test_page_commands.py` runs all of them on little traffic. With `--with-torch` also those that
need the executor and minutes of an idle machine.
"""

__all__ = ["PAGES", "PageCommand", "commands_of", "prepared_folder"]

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`(perfmodel [^`\n]+)`")
# No command to run: SCENARIO, FILE.gguf, FILE..., `...`, ray:HEAD:6379, and files that only a measurement writes.
_PLACEHOLDER = re.compile(r"(?:^|[\s=/:])(?:[A-Z]+(?:\.\w+|\.\.\.)?|\.\.\.|\|)(?=[\s:]|$)|runs\.json|measured/h200")
_FEWEST_WORDS = {"techniques": 2, "validate": 4}  # of a command that can run, where not three
_WITH_TORCH = ("execute", "quality", "validate executor", "validate techniques", "calibrate")
# What stands for a file of the reader's own, and what it is a copy of.
_OWN = {
    "my.yaml": "workloads/scenarios/llama-3.1-8b-a100.yaml",
    "my-scenario.yaml": "workloads/scenarios/mixtral-8x7b-a100-tp2.yaml",
    "my-study.yaml": "workloads/scenarios/studies/kv_caching.yaml",
    "path/to/it.yaml": "workloads/scenarios/llama-3.1-8b-a100.yaml",
    "path/to/mine.yaml": "hardware_specs/engines/vllm.yaml",
    "one-figure.yaml": "workloads/scenarios/published/aic_attn-010.yaml",
    "my-figures/one.yaml": "workloads/scenarios/published/aic_attn-010.yaml",
    "result.json": "tests/data/bench/vllm_detailed.json",
    "serve.sh": "tests/data/serve.sh",
}


@dataclass(frozen=True)
class PageCommand:
    """A command of a page.

    is_named: it says which command is meant, and is none to run; is_refused: the page shows what is wrong with it
    """

    page: Path
    text: str
    is_named: bool
    is_refused: bool = False

    @property
    def words(self) -> list[str]:
        """What follows `perfmodel`, without a comment and without where it is written to."""
        return shlex.split(self.text.partition(" > ")[0], comments=True)[1:]

    @property
    def output(self) -> str | None:
        """The file that what it prints is written to."""
        written = shlex.split(self.text.partition(" > ")[2], comments=True)
        return written[0] if written else None

    @property
    def needs_torch(self) -> bool:
        """Whether it executes or measures something."""
        is_fitted = "calibrate" in self.words and "--name" in self.words  # to what somebody else has measured
        measures = self.text.startswith(tuple(f"perfmodel {name}" for name in _WITH_TORCH)) and not is_fitted
        return measures or "--execute" in self.text


def commands_of(page: Path) -> list[PageCommand]:
    """The page's commands, those of blocks first."""
    whole = page.read_text(encoding="utf-8")
    commands = (PageCommand(page, text, _is_named(text), f"{text}\nerror: " in whole) for text in _texts(whole))
    return list(dict.fromkeys(commands))


def _texts(text: str) -> Iterator[str]:
    for block in _BLOCK.findall(text):
        yield from _lines(block)
    prose = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    yield from (line.strip() for line in prose.splitlines() if line.startswith("    perfmodel "))
    yield from _SPAN.findall(prose)


def _lines(block: str) -> Iterator[str]:
    whole = re.sub(r"\\\n\s*", "", block)
    yield from (line.removeprefix("$ ") for line in whole.splitlines() if re.match(r"(\$ )?perfmodel ", line))


def _is_named(text: str) -> bool:
    words = text.partition(" #")[0].split()
    return len(words) < _FEWEST_WORDS.get(words[1], 3) or bool(_PLACEHOLDER.search(" ".join(words)))


def prepared_folder(folder: Path) -> None:
    """Put into `folder` what the commands find beside them."""
    for name in ("workloads", "hardware_specs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "reports").mkdir()  # where some write theirs
    (folder / "reports/measured").symlink_to(ROOT / "reports/measured")
    for name, source in _OWN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / source).read_bytes())
    from perfmodel.files.yaml_loader import load_yaml

    config = load_yaml(ROOT / "workloads/models/qwen3-8b.yaml").data["config"]
    (folder / "path/to/config.json").write_text(json.dumps(config), encoding="utf-8")


def _run(command: PageCommand, folder: Path) -> str:
    """What is wrong with its end; nothing where all is well."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "executors"), os.environ.get("PYTHONPATH", "")])
    begun = subprocess.Popen(
        [sys.executable, "-m", "perfmodel", *command.words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    heard = _until_it_listens(begun) if command.words[0] == "serve" else ""
    printed, result = begun.communicate()
    completed_process = subprocess.CompletedProcess(begun.args, begun.returncode, printed, heard + result)
    if command.output is not None:
        (folder / command.output).write_text(completed_process.stdout, encoding="utf-8")
    return (
        ""
        if completed_process.returncode == (2 if command.is_refused else 0)
        else f"status {completed_process.returncode}: {completed_process.stderr.strip()[-300:]}"
    )


def _until_it_listens(server: "subprocess.Popen[str]") -> str:
    """Tell a server to end once it listens; what it has said until then."""
    assert server.stderr is not None
    heard = ""
    while line := server.stderr.readline():
        heard += line
        if line.startswith("listening on "):
            server.terminate()
            break
    return heard


def main() -> int:
    """Run the commands of all pages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--with-torch", action="store_true")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    asked = parser.parse_args()
    num_wrong, done = 0, set[str]()
    for page in asked.pages:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepared_folder(folder)
            for command in commands_of(page.resolve()):
                known = command.text in done and command.output is None
                if command.is_named or known or (command.needs_torch and not asked.with_torch):
                    continue
                begun = time.monotonic()
                wrong = _run(command, folder)
                done.add(command.text)
                num_wrong += bool(wrong)
                print(f"{time.monotonic() - begun:6.1f} s  {page.name}: {command.text}  {wrong}", flush=True)
            shutil.rmtree(folder / "out", ignore_errors=True)
    print(f"{num_wrong} commands do not run as written")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
