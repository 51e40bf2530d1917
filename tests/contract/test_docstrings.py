"""Docstrings say what a thing is, in a sentence that stands by itself, and what each of many parameters means."""

import ast
import re

import pytest

pytestmark = pytest.mark.release

HEADLESS = re.compile(r"(Of|Whose|With|From)\b")
MANY = 4
SAME_EVERYWHERE = {"env", "progress"}  # the simulated clock; what is called with (done, of how many)

COMMANDS = {"perfmodel.cli"}


def room(module):
    return ".".join(module.name.split(".")[:2])


def definitions(node, prefix=""):
    """Every function, class and method below `node`, with its dotted name."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{prefix}{child.name}.")


def parameters(function):
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [p.arg for p in named if p.arg not in {"self", "cls"} | SAME_EVERYWHERE]


def is_public(name):
    return all(part == "__init__" or not part.startswith("_") for part in name.split("."))


def undocumented(module):
    """Parameters that the docstring of a public function with many does not name, by the function.

    Those of `__init__` may stand in the docstring of its class, those of a command in the help of its options, and
    those of a function that passes them on where its docstring sends the reader: "See `...`".
    """
    found = dict(definitions(module.tree))
    for name, node in found.items():
        text = ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef) or not is_public(name) or text.startswith("See `"):
            continue
        if len(taken := parameters(node)) >= MANY:
            if node.name == "__init__":
                text += ast.get_docstring(found[name.removesuffix(".__init__")]) or ""
            said = set(re.findall(r"\w+", text))
            if missing := [p for p in taken if p not in said]:
                yield name, missing


def headless(module):
    for name, node in definitions(module.tree):
        if HEADLESS.match(ast.get_docstring(node) or ""):
            yield name


def test_docstrings_name_what_they_describe(modules):
    wrong = [f"{m.name}: {name}" for m in modules for name in headless(m)]
    assert not wrong


def test_many_parameters_are_documented(modules):
    """With its unit, where it has one; a public function with four parameters or more names each in its docstring."""
    wrong = [
        f"{m.name}: {name}: {', '.join(missing)}"
        for m in modules
        if m.name.startswith("perfmodel.") and room(m) not in COMMANDS
        for name, missing in undocumented(m)
    ]
    assert not wrong
