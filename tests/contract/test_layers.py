"""Imports point one way: files, models, specs, ops, cost; engine alone; sim ... report, commands, serve; then cli."""

import ast
import sys

import pytest

# Each room may import those before it, but for what stands beside it.
ORDER = (
    *(
        "version",
        "errors",
        "listening",
        "kv_groups",
        "dates",
        "cores",
        "renderable",
        "files",
        "models",
        "specs",
        "ops",
        "cost",
        "trust",
    ),
    *("engine", "sim", "planning", "evidence", "report", "commands", "serve", "web"),
)
NOT_FOR = {
    "engine": {"listening", "dates", "renderable", "files", "models", "specs", "ops", "cost", "trust"},
    "web": {"serve"},
}
BELOW = {here: set(ORDER[:place]) - NOT_FOR.get(here, set()) for place, here in enumerate(ORDER)}
BELOW |= {"api": set(ORDER), "cli": set(ORDER)}
# Rooms within rooms, lowest first: each may import those before it.
WITHIN = {
    "evidence": (
        "observation",
        "sources",
        "report",
        "predict",
        "fit",
        "breakdown",
        "kinds",
        "leave_out",
        "executed",
        "drift",
    ),
    "sim": ("clock", "traffic", "replica", "fleet", "records", "driver"),
    "report": (
        "document",
        "numbers",
        "drawing",
        "pages",
        "plots",
        "runs",
        "views",
        "terminal",
    ),
    "planning": (
        *("spec", "metrics", "comparison", "typical_step", "points", "workers", "sweep", "findings", "axes", "load"),
        *(
            "study",
            "whatif",
            "encoders",
            "space",
            "surfaces",
            "service",
            "finalist",
            "screen",
            "choice",
            "mixes",
            "result",
            "runs",
        ),
        *("jobs", "operations", "elastic", "search", "export", "speculation"),
    ),
}
# Third parties that only some rooms may use.
HOMES = {
    "torch": {"perfmodel_executors"},
    "triton": {"perfmodel_executors"},
    "simpy": {"perfmodel.sim"},
    "typer": {"perfmodel.cli"},
    "rich": {"perfmodel.cli", "perfmodel.report"},
    "yaml": {"perfmodel.files", "perfmodel.cost", "perfmodel_executors"},
    "pandas": {"perfmodel.renderable"},
    "ray": {"perfmodel.planning"},
    "starlette": {"perfmodel.listening", "perfmodel.serve", "perfmodel.web"},
    "uvicorn": {"perfmodel.listening"},
    "jinja2": {"perfmodel.web", "perfmodel_executors"},
    "markupsafe": {"perfmodel.web"},
    "prometheus_client": {"perfmodel.serve"},
    "zmq": {"perfmodel.serve"},
    "msgspec": {"perfmodel.serve"},
}


def room(name):
    """The room of `perfmodel.<room>...`; names defined in perfmodel/__init__.py belong to none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else None


def test_every_folder_is_a_known_room(modules):
    rooms = {m.name.split(".")[1] for m in modules if m.name.startswith("perfmodel.")}
    assert rooms - {"__main__"} <= set(BELOW)


def test_imports_point_one_way(modules):
    wrong = []
    for module in modules:
        here = room(module.name) if module.name.startswith("perfmodel.") else None
        if here is None:
            continue
        for name in module.imports(at_run_time_only=False):
            there = room(name) if name.startswith("perfmodel.") else None
            if there not in (None, here, *BELOW[here]):
                wrong.append(f"{module.name} imports {name}")
    assert not wrong


@pytest.mark.parametrize("outer", WITHIN)
def test_imports_within_a_room_point_one_way(modules, outer):
    wrong = []
    for module in modules:
        parts = module.name.split(".")
        if parts[:2] != ["perfmodel", outer] or len(parts) == 2:
            continue
        allowed = WITHIN[outer][: WITHIN[outer].index(parts[2]) + 1]
        for name in module.imports(at_run_time_only=False):
            there = name.split(".")
            if there[:2] == parts[:2] and (len(there) < 3 or there[2] not in allowed):
                wrong.append(f"{module.name} imports {name}")
    assert not wrong


OF_THE_ENGINE = ("perfmodel.engine", "perfmodel.errors", "perfmodel.kv_groups")


def test_engine_is_standard_library_only(modules):
    wrong = []
    for module in modules:
        if not module.name.startswith(OF_THE_ENGINE):
            continue
        for name in module.imports(at_run_time_only=False):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and not name.startswith(OF_THE_ENGINE):
                wrong.append(f"{module.name} imports {name}")
    assert not wrong


def test_core_never_imports_the_executors(modules):
    wrong = [
        f"{module.name} imports {name}"
        for module in modules
        if module.name.split(".")[0] == "perfmodel"
        for name in module.imports(at_run_time_only=False)
        if name.split(".")[0] == "perfmodel_executors"
    ]
    assert not wrong


def test_third_parties_stay_in_their_rooms(modules):
    wrong = []
    for module in modules:
        for name in module.imports(at_run_time_only=False):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None and not any(f"{module.name}.".startswith(f"{home}.") for home in homes):
                wrong.append(f"{module.name} imports {name}")
    assert not wrong


def edges(module, names, *, lazily):
    """The modules of `names` that `module` imports when it is loaded; lazily: inside functions, too."""
    nodes = ast.walk(module.tree) if lazily else module.tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & names) - {module.name}


@pytest.mark.parametrize("lazily", [False, True])
def test_no_import_cycles(modules, lazily):
    """Within and across rooms; an import that waits in a function, or for a type checker, ties a knot as well."""
    names = {module.name for module in modules}
    graph = {module.name: edges(module, names, lazily=lazily) for module in modules}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(graph[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in sorted(names):
        visit(name)
