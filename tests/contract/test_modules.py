"""Modules for users list what they offer, sorted and complete; every module stays small enough to read."""

import ast
import re
from collections import Counter
from pathlib import Path

MAX_LINES = 600
INNER_ROOMS = {"perfmodel.cost", "perfmodel.ops", "perfmodel.trust"}  # export what they import, to this package alone
SCHEDULER_METHODS = {"plan", "apply"}


def declared(module):
    """The literal `__all__`, or None."""
    for node in module.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return None


def is_docstring_only(module):
    """A folder's `__init__.py` that only says what the folder is."""
    return len(module.tree.body) == 1 and module.path.name == "__init__.py"


def natural(name):
    """ruff's order (RUF022): constants, classes, the rest; digits by value."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name.lstrip("_")[:1].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def is_for_users(module):
    """Whether people and tools import from it: the package, its functions, and what packages offer."""
    if module.name in INNER_ROOMS:
        return False
    return module.path.name == "__init__.py" or module.name == "perfmodel.api"


def test_all_is_there_and_sorted(modules):
    wrong = []
    for module in modules:
        names = declared(module)
        if names is None and (is_docstring_only(module) or not is_for_users(module)):
            continue
        if names is None:
            wrong.append(f"{module.name}: no __all__")
        elif names != sorted(names, key=natural):
            wrong.append(f"{module.name}: {names} should be {sorted(names, key=natural)}")
        elif len(names) != len(set(names)):
            wrong.append(f"{module.name}: names twice")
    assert not wrong


def test_all_is_complete_and_defined(modules):
    wrong = []
    for module in modules:
        if declared(module) is None and not is_for_users(module):
            continue
        names = set(declared(module) or ())
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        public = {n.name for n in module.tree.body if isinstance(n, definitions) and not n.name.startswith("_")}
        decorated = {n.name for n in module.tree.body if isinstance(n, definitions) and is_registered(n)}
        if missing := public - decorated - names:
            wrong.append(f"{module.name}: not in __all__: {sorted(missing)}")
        if module.path.name != "__init__.py" and (unknown := names - bound(module)):
            wrong.append(f"{module.name}: in __all__ but not defined: {sorted(unknown)}")
    assert not wrong


def is_registered(node):
    """A command registered by its decorator is reached through the app, not by name."""
    return any(".command(" in ast.unparse(decorator) for decorator in node.decorator_list)


def bound(module):
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_every_module_says_what_it_is(modules):
    assert not [module.name for module in modules if not ast.get_docstring(module.tree)]


def test_files_are_short(modules):
    long = {m.name: n for m in modules if (n := len(m.path.read_text(encoding="utf-8").splitlines())) > MAX_LINES}
    assert not long


def test_there_is_one_scheduler(modules):
    """Both clocks use it, or one made of it for engines that admit otherwise; a second one would drift away."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {ast.unparse(base) for base in node.bases}
            if "Scheduler" in bases or any("Protocol" in base for base in bases):
                continue
            methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            if "Scheduler" in node.name.replace("SchedulerConfig", "") or methods >= SCHEDULER_METHODS:
                found.append(f"{module.name}.{node.name}")
    assert found == ["perfmodel.engine.scheduler.Scheduler"]


def test_there_is_one_kv_block_manager(modules):
    found = [
        f"{module.name}.{node.name}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and "BlockManager" in node.name
    ]
    assert found == ["perfmodel.engine.kv_blocks.KVBlockManager"]


def test_public_classes_have_names_of_their_own(modules):
    """A name that two rooms use for two things has to be explained each time it is read."""
    places = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.name)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_test_files_have_names_of_their_own():
    """Folders of tests are no packages: pytest cannot collect two files of one name."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
