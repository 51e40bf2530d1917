"""`Drops`: files that were dropped on the page: a model's config.json, a GGUF or safetensors header, a device, traffic.

A page's address never names a file of this machine. What is dropped is kept under its own digest in a folder that ends
with the server, and stands in an address as `drop:DIGEST/name`; the page sends it again where the server has
forgotten it.
"""

__all__ = ["MOST_BYTES", "Drops", "field_of", "hidden", "resolved", "with_files", "without_marks"]

import os
import re
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.files.reach import PACKAGE
from perfmodel.web.questions import Question

MOST_BYTES = 64_000_000  # of one file, or of the header at its beginning
_MOST_FILES, _MOST_TOGETHER = 20, 320_000_000
_HEADED = (".gguf", ".safetensors")  # of which the beginning says it all
_SUFFIXES = (".json", *_HEADED, ".yaml", ".yml", ".csv", ".jsonl", ".txt")
_LARGEST = 10**13  # of a file of which the beginning is here
_KEY = re.compile(r"^([a-z_]+):", re.MULTILINE)
_TELLING = {"hardware": {"declared"}, "traffic": {"arrivals", "input_tokens"}}  # of what a file's keys tell
_MARK = re.compile(r"drop:([0-9a-f]{16})/([A-Za-z0-9_][A-Za-z0-9_.-]{0,99})")


class Drops:
    """Dropped files in a folder of this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="perfmodel-web-")
        self._files: OrderedDict[str, tuple[Path, int]] = OrderedDict()  # digest -> where, and what it takes

    @property
    def folder(self) -> Path:
        """Where they are."""
        return Path(self._folder.name).resolve()  # as messages name it where the system's own is a link

    def close(self) -> None:
        """Take them all away."""
        self._folder.cleanup()

    def take(self, name: str, content: bytes, full_size: int | None = None) -> str:
        """Keep a file; returns what stands for it in an address.

        full_size: of a file whose beginning this is, in bytes: headers say where tensors are, and readers look

        Raises SpecError for a name or a size that no such file has.
        """
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name.replace("\\", "/").rpartition("/")[2])[-100:].lstrip(".-")
        suffix = Path(name).suffix.lower()
        if suffix not in _SUFFIXES:
            raise SpecError(f"{name or 'the file'}: found {suffix or 'no suffix'}, allowed {', '.join(_SUFFIXES)}.")
        size = max(full_size or 0, len(content))
        most = _LARGEST if suffix in _HEADED else MOST_BYTES
        if size > most or len(content) > MOST_BYTES:
            raise SpecError(f"{name}: {size:,} bytes, allowed {most:,}.")
        if size > len(content) and suffix not in _HEADED:
            raise SpecError(f"{name}: {len(content):,} of its {size:,} bytes came; drop it again.")
        digest = sha256(b"%d " % size + content).hexdigest()[:16]
        if digest not in self._files:
            self._keep(digest, name, content, size)
        self._files.move_to_end(digest)
        return f"drop:{digest}/{self._files[digest][0].name}"

    def _keep(self, digest: str, name: str, content: bytes, size: int) -> None:
        folder = self.folder / digest
        try:
            folder.mkdir()
            with (folder / name).open("wb") as file:
                file.write(content)
                file.truncate(size)  # what follows a header is a hole, which takes no room
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SpecError(f"{name}: cannot be kept ({error.strerror}); make room for it.") from None
        self._files[digest] = folder / name, len(content)
        while len(self._files) > _MOST_FILES or sum(size for _, size in self._files.values()) > _MOST_TOGETHER:
            _, (path, _) = self._files.popitem(last=False)
            shutil.rmtree(path.parent, ignore_errors=True)


def field_of(name: str, content: bytes) -> str:
    """The key of an address that a dropped file is for: a YAML file by its own keys, any other is a model."""
    if not name.lower().endswith((".yaml", ".yml")):
        return "model"
    keys = set(_KEY.findall(content.decode("utf-8", "replace")))
    if {"model", "traffic"} <= keys or {"model", "hardware"} <= keys:
        return "scenario"
    return next((field for field, telling in _TELLING.items() if telling & keys), "model")


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
    sets = tuple(resolved(text, folder) for text in question.sets)
    return replace(question, scenario=resolved(question.scenario, folder), flags=flags, sets=sets)


def hidden(text: str, folder: Path) -> str:
    """`text` with names of dropped files in place of their paths in `folder`, and the catalogue's without the folder
    that it lies in."""
    separator = re.escape(os.sep)
    text = re.sub(re.escape(str(folder)) + f"{separator}[0-9a-f]{{16}}{separator}", "", text).replace(str(folder), "")
    return text.replace(f"{PACKAGE / '_data'}{os.sep}", "").replace(f"{PACKAGE.parent}{os.sep}", "")


def without_marks(text: str) -> str:
    """`text` with the names of dropped files in place of what stands for them: as its reader calls them."""
    return _MARK.sub(lambda found: found[2], text)
