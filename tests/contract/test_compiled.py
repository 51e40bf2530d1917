"""What the wheel's optional build hook compiles: the list in pyproject.toml fits the code, and the code fits mypyc."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"][
    "custom"
]
GROUP = sorted(
    path for pattern in HOOK["include"] for path in ROOT.glob(pattern.lstrip("/")) if path.name not in HOOK["exclude"]
)


def test_the_hook_is_off_unless_asked_for() -> None:
    assert HOOK["enable-by-default"] is False


@pytest.mark.parametrize("pattern", HOOK["include"])
def test_each_pattern_names_sources_that_are_there(pattern: str) -> None:
    assert list(ROOT.glob(pattern.lstrip("/")))


def test_the_whole_engine_is_in_the_group() -> None:
    """Compiled in part it is slower than interpreted: each call into the other part is converted there and back."""
    engine = {path for path in (ROOT / "perfmodel/engine").glob("*.py") if path.name != "__init__.py"}
    assert engine <= set(GROUP)


@pytest.mark.parametrize("path", GROUP, ids=lambda path: path.stem)
def test_modules_of_the_group_compile(path: Path) -> None:
    """mypyc asks protocols nothing at run time, and makes none of those that inherit from others."""
    tree = ast.parse(path.read_text())
    protocols = [
        [ast.unparse(base).split("[")[0] for base in node.bases]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
    ]
    assert all(bases == ["Protocol"] for bases in protocols)
    assert "runtime_checkable" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
