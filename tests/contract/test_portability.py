"""Nothing that stops Windows or macOS by the project's own files: what only POSIX has is guarded, texts say how they
are encoded, and every name is one that any file system keeps.

What a system does beyond that, only the system can show.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

POSIX_MODULES = {"crypt", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": {
        *("chown", "chroot", "ctermid", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid"),
        *("getgroups", "getloadavg", "getpgid", "getpgrp", "getpriority", "getsid", "getuid", "initgroups", "killpg"),
        *("mkfifo", "mknod", "nice", "openpty", "posix_spawn", "sched_getaffinity", "sched_setaffinity", "setgid"),
        *("setpgid", "setpriority", "setsid", "setuid", "statvfs", "sysconf", "ttyname", "uname", "wait3", "wait4"),
    },
    "signal": {
        *("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1", "SIGUSR2"),
        *("alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait"),
    },
    "socket": {"AF_UNIX", "SO_REUSEPORT", "SO_REUSEADDR", "socketpair", "sendmsg"},
    "time": {"tzset"},
}
pytestmark = pytest.mark.release

# https://learn.microsoft.com/windows/win32/fileio/naming-a-file
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
FORBIDDEN = set('<>:"/\\|?*')
LONGEST_PATH = 150  # of Windows' 260 characters, less those of the folder that it is put in
NOT_OURS = {".git", ".venv", "build", "dist", "out", "node_modules", "site", "shared"}
TEXT_FILES = {"open", "read_text", "write_text", "fdopen", "TemporaryFile", "NamedTemporaryFile"}


def unguarded(tree, is_posix):
    """Nodes that only POSIX knows, outside of `if sys.platform ...`, `if hasattr(...)` and `try ... except`."""

    def walk(node, is_guarded):
        if isinstance(node, ast.If | ast.IfExp) and any(
            word in ast.unparse(node.test) for word in ("sys.platform", "hasattr", "TYPE_CHECKING")
        ):
            is_guarded = True
        if isinstance(node, ast.Try) and any(
            "ImportError" in ast.unparse(each.type) or "AttributeError" in ast.unparse(each.type)
            for each in node.handlers
            if each.type is not None
        ):
            is_guarded = True
        if not is_guarded and is_posix(node):
            yield node
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_guarded)

    return walk(tree, False)


def is_posix(node):
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in POSIX_MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module in POSIX_MODULES or any(a.name in POSIX_NAMES.get(module, ()) for a in node.names)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr in POSIX_NAMES.get(node.value.id, ())
    return False


def test_what_only_posix_has_is_guarded(modules):
    wrong = [f"{m.name}:{node.lineno}: {ast.unparse(node)}" for m in modules for node in unguarded(m.tree, is_posix)]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import resource", 1),
        ("from os import fork", 1),
        ("os.fork()", 1),
        ("if sys.platform != 'win32':\n    import resource", 0),
        ("if hasattr(os, 'fork'):\n    os.fork()", 0),
        ("os.path.join(a)\nimport os", 0),
    ],
)
def test_the_guard_is_seen(source, count):
    assert len(list(unguarded(ast.parse(source), is_posix))) == count


def test_signal_handlers_of_a_loop_may_be_refused(modules):
    """`loop.add_signal_handler` raises NotImplementedError on Windows."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.With | ast.Try) and "NotImplementedError" in ast.unparse(node):
                for inner in ast.walk(node):
                    inner.is_allowed = True
        called = [
            node
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and node.attr in ("add_signal_handler", "remove_signal_handler")
        ]
        assert all(getattr(node, "is_allowed", False) for node in called), module.name


def calls(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield node, node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def mode_of(node, name):
    """The mode of a call that opens a file; that of writing for `write_text`; empty where it opens none."""
    if name in ("read_text", "write_text"):
        is_method = isinstance(node.func, ast.Attribute)
        return {"read_text": "r", "write_text": "w"}[name] if is_method else ""
    if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("os", "self", "Image", "webbrowser"):
        return ""
    place = 0 if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "gzip" else 1
    given = [each.value for each in node.keywords if each.arg == "mode"] or node.args[place : place + 1]
    return ast.literal_eval(given[0]) if given and isinstance(given[0], ast.Constant) else "r"


def test_texts_say_how_they_are_encoded_and_end_lines(modules):
    """Windows reads cp1252 and writes carriage returns unless told: equal seeds give equal bytes there, too."""
    wrong = []
    for module in modules:
        for node, name in calls(module):
            mode = mode_of(node, name) if name in TEXT_FILES else ""
            said = {each.arg for each in node.keywords}
            if not mode or "b" in mode:
                continue
            if "encoding" not in said or (set(mode) & set("wax") and "newline" not in said):
                wrong.append(f"{module.name}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not wrong


def test_what_other_programs_print_is_read_in_a_stated_encoding(modules):
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules
        for node, name in calls(module)
        if name in ("run", "Popen", "check_output")
        and any(each.arg in ("text", "universal_newlines") for each in node.keywords)
    ]
    assert not wrong


def test_processes_are_spawned(modules):
    """Windows has no other way, and macOS and Python 3.14 no longer fork by default."""
    for module in modules:
        for node, name in calls(module):
            if name in ("get_context", "set_start_method"):
                assert [ast.unparse(each) for each in node.args] == ["'spawn'"], module.name
            assert ast.unparse(node.func) not in ("multiprocessing.Process", "multiprocessing.Pool"), module.name


def our_files():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in NOT_OURS and not name.endswith((".egg-info", "_cache", "__pycache__", ".hypothesis"))
        ]
        yield from (os.path.relpath(os.path.join(folder, name), ROOT) for name in files + folders)


def test_names_are_legal_on_windows_and_differ_by_more_than_case():
    seen = {}
    for path in our_files():
        name = os.path.basename(path)
        assert not FORBIDDEN & set(name), path
        assert name.isascii(), path
        assert name.isprintable(), path
        assert name[-1] not in " .", path
        assert name.split(".")[0].lower() not in RESERVED, path
        assert len(path) <= LONGEST_PATH, path
        assert not os.path.islink(ROOT / path), path
        assert path.lower() not in seen, (path, seen[path.lower()])
        seen[path.lower()] = path
    assert len(seen) > 1000


# All modules are loaded once, so that third parties are there as on this system; ours are then loaded again in a Python
# that has lost what Windows has not, and takes itself for it.
_AS_ON_WINDOWS = """
import json, os, pkgutil, signal, sys, multiprocessing.connection
from importlib import import_module
def load():
    import perfmodel
    missing = []
    for each in pkgutil.walk_packages(perfmodel.__path__, "perfmodel."):
        if each.name.endswith("__main__"):
            continue
        try:
            import_module(each.name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] == "perfmodel" or error.name in POSIX_MODULES:
                raise
            missing.append(each.name)  # an extra that is not installed
    return missing
load()
from perfmodel.cli import main
for name in [each for each in sys.modules if each.split(".")[0] == "perfmodel"]:
    del sys.modules[name]
for name in POSIX_MODULES:
    sys.modules[name] = None
for module, names in POSIX_NAMES.items():
    for name in names - {"SO_REUSEADDR", "socketpair"}:
        if hasattr(sys.modules.get(module), name):
            delattr(sys.modules[module], name)
multiprocessing.connection.PipeConnection = multiprocessing.connection.Connection
sys.platform = "win32"
load()
from perfmodel.cli import main
sys.argv = ["perfmodel", "simulate", "llama-3.1-8b-a100", "--set", "traffic.num_requests=20", "--json"]
main()
"""


@pytest.mark.slow
def test_all_modules_load_and_one_command_runs_without_what_windows_lacks(tmp_path):
    known = f"POSIX_MODULES = {POSIX_MODULES!r}\nPOSIX_NAMES = {POSIX_NAMES!r}\n"
    found = subprocess.run(
        [sys.executable, "-c", known + _AS_ON_WINDOWS], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["completed"] == 20
