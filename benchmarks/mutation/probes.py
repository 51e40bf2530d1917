"""Which tests run which line: lines of a copy that say so when they run, and a plugin of pytest that listens."""

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bugs import FUNCTIONS, Bug

BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.ClassDef, *FUNCTIONS)
MAP_EXAMPLES = 8  # of hypothesis, to find out what a test runs


def places(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    """Each statement with the one before which a line may be inserted: inside of functions, else None."""

    def walk(body: list[ast.stmt], is_inside: bool, hoisted: ast.stmt | None) -> Iterator[tuple[Any, Any]]:
        for statement in body:
            here = hoisted or (statement if is_inside else None)
            yield statement, here
            inside = is_inside or isinstance(statement, FUNCTIONS)
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(statement, field, [])
                is_elif = field == "orelse" and isinstance(statement, ast.If) and inner and isinstance(inner[0], ast.If)
                yield from walk(inner, inside, here if is_elif else None)
            for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
                yield from walk(part.body, inside, None)

    return walk(tree.body, False, None)


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Of a statement with a block, its head alone."""
    inner = {id(item) for field in ("body", "orelse", "finalbody", "handlers", "cases")
             for item in getattr(statement, field, []) if isinstance(statement, BLOCKS)}  # fmt: skip
    waiting = [child for child in ast.iter_child_nodes(statement) if id(child) not in inner]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += ast.iter_child_nodes(node)


def names_bound(statement: ast.stmt) -> set[str]:
    """What code that uses an import-time statement calls it."""
    if isinstance(statement, FUNCTIONS):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    nodes = [node for target in targets if target is not None for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def probe(copy: Path, bugs: list[Bug]) -> None:
    """Let the lines of `bugs` in the copy say that they run."""
    (copy / "mutation_probe.py").write_text("HITS = set()\nhit = HITS.add\n", encoding="utf-8")
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted((copy / "perfmodel").rglob("*.py"))}
    wanted: dict[Path, dict[int, set[int]]] = {path: {} for path in trees}
    by_name: dict[str, set[int]] = {}
    for number, bug in enumerate(bugs):
        spans = [(s, at) for s, at in places(trees[copy / bug.path]) if s.lineno <= bug.line <= (s.end_lineno or 0)]
        statement, at = spans[-1]
        if at is not None:
            wanted[copy / bug.path].setdefault(at.lineno, set()).add(number)
        else:
            for name in names_bound(statement):
                by_name.setdefault(name, set()).add(number)
    for path, tree in trees.items():
        for statement, at in places(tree):
            if at is not None:
                nodes = list(own_nodes(statement))
                used = {getattr(node, key, None) for node in nodes for key in ("id", "attr", "arg")}
                numbers = set().union(*(by_name[name] for name in used & by_name.keys()))
                if numbers:
                    wanted[path].setdefault(at.lineno, set()).update(numbers)
        lines = path.read_text("utf-8").splitlines(keepends=True)
        for line, numbers in sorted(wanted[path].items(), reverse=True):
            text = lines[line - 1]
            hits = "; ".join(f"_hit({number})" for number in sorted(numbers))
            indent = text[: len(text) - len(text.lstrip())]
            lines.insert(line - 1, f'{indent}_hit = __import__("mutation_probe").hit; {hits}\n')
        path.write_text("".join(lines), encoding="utf-8")


class Mapper:
    """A pytest plugin: of each test that passes, the lines that it runs and the CPU seconds that it would take."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, list[int]]] = {}
        self._times: dict[str, float] = {}
        self._module: Any = None
        self._passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from hypothesis import settings

        name = "_hypothesis_internal_use_settings"
        for test in {item.obj for item in items if hasattr(getattr(item, "obj", None), name)}:
            own = getattr(test, name)
            fewer = min(own.max_examples, MAP_EXAMPLES)
            self._times |= {i.nodeid: own.max_examples / fewer for i in items if getattr(i, "obj", None) is test}
            setattr(test, name, settings(own, max_examples=fewer, deadline=None))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        from mutation_probe import HITS  # type: ignore[import-not-found]

        if item.module is not self._module:  # what one module has cached would hide from the next that it is run
            self._module = item.module
            for name, module in list(sys.modules.items()):
                for var in vars(module).values() if name.startswith("perfmodel") and module else ():
                    if hasattr(var, "cache_clear"):
                        var.cache_clear()
        HITS.clear()
        start = time.process_time()
        result = yield
        seconds = (time.process_time() - start) * self._times.get(item.nodeid, 1.0)
        if item.nodeid in self._passed:
            self.found[item.nodeid] = (seconds, sorted(HITS))
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
