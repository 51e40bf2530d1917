"""A copy of the tree to plant bugs in, and pytest in a child process that inherits slow imports."""

import gc
import importlib
import inspect
import multiprocessing
import os
import pkgutil
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import pytest
from bugs import ROOT

SLOW_IMPORTS = ("numpy", "scipy.special", "scipy.optimize", "pydantic", "simpy", "typer", "rich", "hypothesis")
NOT_RUN = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


def import_slow() -> None:
    """Also turns off shrinking in hypothesis, since any failing example is enough."""
    for name in SLOW_IMPORTS:
        __import__(name)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("planted", derandomize=True, database=None, phases=phases)
    os.environ["HYPOTHESIS_PROFILE"] = "planted"


_FUNCTIONS: dict[tuple[str, CodeType], list[FunctionType]] = {}


def import_package(tree: Path) -> None:
    """Import all modules of the package of `tree` and index their functions for `body_changes`."""
    sys.path.insert(0, str(tree))
    package = importlib.import_module("perfmodel")
    for module in pkgutil.walk_packages(package.__path__, "perfmodel."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for obj in gc.get_objects():
        if isinstance(obj, FunctionType):
            _FUNCTIONS.setdefault((obj.__code__.co_filename, obj.__code__), []).append(obj)
    gc.freeze()


def body_changes(path: Path, changed: bytes) -> list[tuple[FunctionType, CodeType]] | None:
    """Functions of an imported module and their new bodies in `changed`; None if anything else changes."""
    pairs = _differing(*(compile(text, path, "exec", dont_inherit=True) for text in (path.read_bytes(), changed)))
    changes = [(_FUNCTIONS.get((str(path), old), []), new) for old, new in pairs or ()]
    if not changes or any(not functions for functions, _ in changes):
        return None
    if any(old.co_freevars != new.co_freevars for old, new in pairs or ()):
        return None
    return [(function, new) for functions, new in changes for function in functions]


def _differing(good: CodeType, bad: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Pairs of differing function bodies; None if code executed on import differs as well."""
    if _on_import(good) != _on_import(bad):
        return None
    pairs: list[tuple[CodeType, CodeType]] = []
    nested = [[const for const in code.co_consts if isinstance(const, CodeType)] for code in (good, bad)]
    for old, new in zip(*nested, strict=True):
        if old.co_flags & inspect.CO_OPTIMIZED:
            pairs += [(old, new)] if old != new else []
        elif (inner := _differing(old, new)) is None:
            return None
        else:
            pairs += inner
    return pairs


def _on_import(code: CodeType) -> tuple[object, ...]:
    """Instructions and constants, without line numbers and function bodies."""
    consts = [const.co_name if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, consts


def copy_tree(folder: Path) -> Path:
    """The working tree without ignored files."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    os.symlink(ROOT.parent / "shared", folder.parent / "shared")
    return folder


def compile_copy(copy: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", "perfmodel", "tests"], cwd=copy, check=False)


def run_in_child(
    copy: Path,
    arguments: list[str],
    plugin: Any,
    limit_s: int | None,
    result: Callable[[], str] | None = None,
    out: Path | None = None,
) -> int:
    """Run pytest in a child process: its exit status, or minus a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.setsid()
    multiprocessing.current_process().daemon = False  # a worker of a pool is one, and tests could start no process
    os.chdir(copy)
    if limit_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 * limit_s)  # for tests that sleep or wait for a child process
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


def run_planted(path: Path, changed: bytes, run: Callable[[], int]) -> int:
    """The result of `run` while the file holds `changed`."""
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
