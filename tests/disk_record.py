"""What the disk is asked for meanwhile: every path that is opened, listed or looked at."""

__all__ = ["recorded"]

import builtins
import io
import os
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

_ASKED = (
    *((os, name) for name in ("stat", "lstat", "open", "scandir", "listdir", "readlink", "access")),
    *((builtins, "open"), (io, "open")),
    *((Path, name) for name in ("open", "read_text", "read_bytes", "exists", "is_file", "is_dir", "expanduser")),
)


@contextmanager
def recorded():
    """The paths, as they are asked for."""
    found = []

    def watching(asked):
        def ask(*args, **kwargs):
            if args and isinstance(args[0], str | bytes | os.PathLike):
                found.append(os.fsdecode(args[0]).replace("\\", "/"))
            return asked(*args, **kwargs)

        return ask

    patches = [patch.object(place, name, watching(getattr(place, name))) for place, name in _ASKED]
    for each in patches:
        each.start()
    try:
        yield found
    finally:
        for each in reversed(patches):
            each.stop()
