"""`Drops`: files that were dropped on the page: a model's config.json, a GGUF or safetensors header, a device, traffic.

A page's address never names a file of this machine. What is dropped is kept under its own digest in a folder that ends
with the server, and stands in an address as `drop:DIGEST/name`; the page sends it again where the server has
forgotten it.
"""

__all__ = ["MOST_BYTES", "Drops", "resolved", "with_files", "without_marks"]

import re
import tempfile
from collections import OrderedDict
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.web.questions import Question

MOST_BYTES = 64_000_000  # of one file, or of the header at its beginning
_MOST_FILES = 20
_SUFFIXES = (".json", ".gguf", ".safetensors", ".yaml", ".yml", ".csv", ".jsonl", ".txt")
_MARK = re.compile(r"drop:([0-9a-f]{16})/([\w.-]{1,100})")


class Drops:
    """Dropped files in a folder of this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="perfmodel-web-")
        self._files: OrderedDict[str, Path] = OrderedDict()

    @property
    def folder(self) -> Path:
        """Where they are."""
        return Path(self._folder.name)

    def close(self) -> None:
        """Take them all away."""
        self._folder.cleanup()

    def take(self, name: str, content: bytes, full_size: int | None = None) -> str:
        """Keep a file; returns what stands for it in an address.

        full_size: of a file whose beginning this is, in bytes: headers say where tensors are, and readers look

        Raises SpecError for a name or a size that no such file has.
        """
        name = re.sub(r"[^\w.-]+", "-", name.replace("\\", "/").rpartition("/")[2])[-100:].lstrip(".-")
        suffix = Path(name).suffix.lower()
        if suffix not in _SUFFIXES:
            raise SpecError(f"{name or 'the file'}: found {suffix or 'no suffix'}, allowed {', '.join(_SUFFIXES)}.")
        if len(content) > MOST_BYTES:
            raise SpecError(f"{name}: {len(content):,} bytes, allowed {MOST_BYTES:,}.")
        digest = sha256(content + str(full_size).encode()).hexdigest()[:16]
        if digest not in self._files:
            folder = self.folder / digest
            folder.mkdir()
            (folder / name).write_bytes(content)
            if full_size is not None and len(content) < full_size < 10**13:
                with (folder / name).open("r+b") as file:
                    file.truncate(full_size)  # a hole, which takes no room
            self._files[digest] = folder / name
            self._leave_out()
        return f"drop:{digest}/{self._files[digest].name}"

    def _leave_out(self) -> None:
        while len(self._files) > _MOST_FILES:
            _, path = self._files.popitem(last=False)
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def resolved(text: str, folder: Path) -> str:
    """`text` with the path of each dropped file in place of what stands for it.

    Raises SpecError for a file that was dropped on another server, or long ago.
    """

    def place(found: re.Match[str]) -> str:
        path = folder / found[1] / found[2]
        if not path.is_file():
            raise SpecError(f"{found[2]}: is not here any more; drop the file on the page again.")
        return str(path)

    return _MARK.sub(place, text)


def with_files(question: Question, folder: Path) -> Question:
    """`question` with paths of dropped files; see `resolved`."""
    flags = tuple((name, resolved(value, folder)) for name, value in question.flags)
    return replace(question, flags=flags, sets=tuple(resolved(text, folder) for text in question.sets))


def without_marks(text: str) -> str:
    """`text` with the names of dropped files in place of what stands for them: as its reader calls them."""
    return _MARK.sub(lambda found: found[2], text)
