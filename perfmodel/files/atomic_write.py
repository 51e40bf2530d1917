"""Atomic writes: after any failure a file is entirely old or entirely new."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from perfmodel.errors import SpecError


def atomic_write_all(texts: Mapping[Path, str]) -> list[Path]:
    """Write several files atomically, with parent folders; return their paths. All are written before any is replaced.

    Raises SpecError if one cannot be written; then none is changed."""
    partials = {file: file.with_name(f"{file.name}.partial") for file in texts}
    try:
        for file, partial in partials.items():
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(texts[file], encoding="utf-8", newline="\n")
        for file, partial in partials.items():
            partial.replace(file)
    except OSError as error:
        for partial in partials.values():
            with suppress(OSError):  # its folder is none, or not ours: then it was not written either
                partial.unlink(missing_ok=True)
        raise SpecError(f"{file}: cannot be written: {error.strerror or error}.") from None
    return list(texts)


def atomic_write(path: Path, text: str) -> Path:
    """`atomic_write_all` of one file."""
    return atomic_write_all({path: text})[0]
