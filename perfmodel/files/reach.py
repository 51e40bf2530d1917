"""Which files may be touched: any, or, within `without_files`, only the catalogue's and those below some folders.

A page in a browser says names that anybody may have written into its address. There a name is never a path of this
machine: what would be looked for as one is refused before the disk is asked, so that no answer tells whether a file is
there, and nothing is fetched from the network. Uploaded files lie in a folder of their own, which is allowed.

The limits hold in the context (`contextvars`) that set them, and in the worker processes that it starts.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError

PACKAGE = Path(__file__).resolve().parent.parent
_OWN = (PACKAGE / "_data", *(PACKAGE.parent / name for name in ("hardware_specs", "workloads", "reports")))
_ALLOWED: ContextVar[tuple[Path, ...] | None] = ContextVar("allowed", default=None)
# From the root, a user's folder or here, up a folder, a drive, a Windows path; or what only files are called.
_PATH_LIKE = re.compile(r"[/~]|\.{1,2}([/\\]|$)|.*[/\\]\.\.([/\\]|$)|[A-Za-z]:|.*\\|.*\0", re.DOTALL)
_SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".gguf", ".safetensors", ".csv", ".txt", ".gz")
_LONGEST = 80  # characters of a name that is refused


@contextmanager
def without_files(allowed: Sequence[str | Path] = ()) -> Iterator[None]:
    """Within it names are the catalogue's, or those of files below the folders `allowed`; others raise SpecError."""
    token = _ALLOWED.set(tuple(Path(os.path.abspath(folder)) for folder in allowed))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@contextmanager
def touchable(folder: Path) -> Iterator[None]:
    """Within it files below `folder` may be touched as well: a cache that is asked by names alone."""
    allowed = _ALLOWED.get()
    token = _ALLOWED.set(None if allowed is None else (*allowed, Path(os.path.abspath(folder))))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def is_only_names() -> bool:
    """Whether files are refused here, and the network."""
    return _ALLOWED.get() is not None


def may_touch(path: str | Path) -> bool:
    """Whether the disk may be asked for `path`. A link below an allowed folder does not lead out of it."""
    allowed = _ALLOWED.get()
    if allowed is None:
        return True
    text = str(path)
    if "\0" in text or not _is_below(os.path.abspath(text), (*allowed, *_OWN)):
        return False
    return _is_below(os.path.realpath(text), [os.path.realpath(folder) for folder in (*allowed, *_OWN)])


def _is_below(path: str, folders: Sequence[str | Path]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def refuse_path(name: str | Path) -> None:
    """Raises SpecError for what can only be the path of a file, where that may not be touched."""
    text = str(name)
    is_path = isinstance(name, Path) or _PATH_LIKE.match(text) or text.lower().endswith(_SUFFIXES)
    if is_path and not may_touch(name):
        raise refused(text)


def refused(name: str) -> SpecError:
    """What is said of a name that may not be looked for as a path."""
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    return SpecError(f"{shown!r} names a file; here only names of the catalog are allowed: drop the file on the page.")


@dataclass(frozen=True)
class _Within:
    """A function with the limits of who made this, in whatever process."""

    function: Callable[[Any], Any]
    allowed: tuple[Path, ...]

    def __call__(self, item: Any) -> Any:
        with without_files(self.allowed):
            return self.function(item)


def within_reach(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function`, to be called in another process with the limits that hold here."""
    allowed = _ALLOWED.get()
    return function if allowed is None else _Within(function, allowed)
