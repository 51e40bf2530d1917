"""The source as syntax trees: nothing is imported, so that a test can say what would be."""

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"perfmodel": ROOT / "perfmodel", "perfmodel_executors": ROOT / "executors" / "perfmodel_executors"}


@dataclass(frozen=True)
class Module:
    """One source file: dotted name, path, tree."""

    name: str
    path: Path
    tree: ast.Module

    def imports(self, at_run_time_only=True):
        """Dotted names of what it imports, wherever in the file; `if TYPE_CHECKING` blocks count only if asked."""
        skipped = set()
        if at_run_time_only:
            for node in ast.walk(self.tree):
                if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                    skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
        found = set()
        for node in ast.walk(self.tree):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: relative import"
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found


def load_modules():
    modules = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "_data" in path.parts:
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            modules.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return modules


@pytest.fixture(scope="session")
def modules():
    return load_modules()


@pytest.fixture
def run_python(tmp_path):
    """Runs code in a fresh interpreter away from the checkout and returns its stdout."""

    def run(code, *args, check=True):
        env = os.environ | {"PYTHONPATH": os.pathsep.join(str(folder.parent) for folder in PACKAGES.values())}
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    return run
