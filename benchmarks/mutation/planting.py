"""A copy of the tree to plant bugs in, and pytest in a child of this process, which has what takes long to import."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from bugs import ROOT

SLOW_IMPORTS = ("numpy", "scipy.special", "scipy.optimize", "pydantic", "simpy", "typer", "rich", "hypothesis")
NOT_RUN = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


def import_slow() -> None:
    """Also says that hypothesis need not look for the smallest example of a test that fails."""
    for name in SLOW_IMPORTS:
        __import__(name)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("planted", derandomize=True, database=None, phases=phases)
    os.environ["HYPOTHESIS_PROFILE"] = "planted"


def copied(folder: Path) -> Path:
    """The tree as it is, what git ignores left out."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    os.symlink(ROOT.parent / "shared", folder.parent / "shared")
    return folder


def compile_copy(copy: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", "perfmodel", "tests"], cwd=copy, check=False)


def in_child(
    copy: Path,
    arguments: list[str],
    plugin: Any,
    limit_s: int | None,
    result: Callable[[], str] | None = None,
    out: Path | None = None,
) -> int:
    """pytest in a child of this process; its status, or minus a signal."""
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


def planted(path: Path, changed: bytes, run: Callable[[], int]) -> int:
    """What `run` gives while `changed` is in the file."""
    good = path.read_bytes()
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_bytes(changed)
    try:
        return run()
    finally:
        path.write_bytes(good)


def verdict(status: int) -> str:
    return "survived" if status == 0 else "killed" if status > 0 else "endless"
