"""Query results as shown on a page, uploads, and the result cache.

Every figure is in the JSON of the request's command. Addresses never name local files: an upload (config.json, a GGUF
or safetensors header, a device, traffic) is stored by digest in a temporary folder and addressed as `drop:DIGEST/name`;
the page resends it if the server has lost it."""

import os
import pickle
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from perfmodel.commands.request import QUIET, CommandRequest, Console
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.sandbox import PACKAGE

MAX_BYTES = 64_000_000  # of one file, or of the header at its beginning
_MAX_FILES, _MAX_TOGETHER = 20, 320_000_000
_HEADED = (".gguf", ".safetensors")  # of which the beginning says it all
_SUFFIXES = (".json", *_HEADED, ".yaml", ".yml", ".csv", ".jsonl", ".txt")
_LARGEST = 10**13  # of a file of which the beginning is here
_KEY = re.compile(r"^([a-z_]+):", re.MULTILINE)
_TELLING = {"hardware": {"declared"}, "traffic": {"arrivals", "input_tokens"}}  # of what a file's keys tell
_MARK = re.compile(r"drop:([0-9a-f]{16})/([A-Za-z0-9_][A-Za-z0-9_.-]{0,99})")


class Uploads:
    """Uploaded files in a folder of this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="perfmodel-web-")
        self._files: OrderedDict[str, tuple[Path, int]] = OrderedDict()  # digest -> where, and what it takes

    @property
    def folder(self) -> Path:
        return Path(self._folder.name).resolve()  # as messages name it where the system's own is a link

    def close(self) -> None:
        """Delete all uploads."""
        self._folder.cleanup()

    def take(self, name: str, content: bytes, full_size: int | None = None) -> str:
        """Store a file; return its address token. Raises SpecError for an invalid name or size. full_size: bytes of the
        whole file, if `content` is its beginning (headers with tensor offsets)"""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name.replace("\\", "/").rpartition("/")[2])[-100:].lstrip(".-")
        suffix = Path(name).suffix.lower()
        if suffix not in _SUFFIXES:
            raise SpecError(f"{name or 'the file'}: got {suffix or 'no suffix'}; expected {', '.join(_SUFFIXES)}.")
        size = max(full_size or 0, len(content))
        most = _LARGEST if suffix in _HEADED else MAX_BYTES
        if size > most or len(content) > MAX_BYTES:
            raise SpecError(f"{name}: {size:,} bytes; expected at most {most:,}.")
        if size > len(content) and suffix not in _HEADED:
            raise SpecError(f"{name}: {len(content):,} of its {size:,} bytes came; drop it again.")
        digest = sha256(b"%d " % size + content).hexdigest()[:16]
        if digest not in self._files:
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
            while len(self._files) > _MAX_FILES or sum(size for _, size in self._files.values()) > _MAX_TOGETHER:
                _, (path, _) = self._files.popitem(last=False)
                shutil.rmtree(path.parent, ignore_errors=True)
        self._files.move_to_end(digest)
        return f"drop:{digest}/{self._files[digest][0].name}"


def field_of(name: str, content: bytes, path: Path | None = None) -> str:
    """State key for an upload: by its keys for YAML, `results` if it is a load tool's at `path`, else a model."""
    if not name.lower().endswith((".yaml", ".yml")):
        from perfmodel.evidence.sources.bench import read_bench_files

        with suppress(PerfmodelError):
            return "results" if path and not name.lower().endswith(_HEADED) and read_bench_files((path,)) else "model"
        return "model"
    keys = set(_KEY.findall(content.decode("utf-8", "replace")))
    if {"model", "traffic"} <= keys or {"model", "hardware"} <= keys:
        return "scenario"
    return next((field for field, telling in _TELLING.items() if telling & keys), "model")


def resolved(text: str, folder: Path) -> str:
    """`text` with upload tokens replaced by paths. Raises SpecError for an unknown upload."""

    def place(mark: re.Match[str]) -> str:
        path = folder / mark[1] / mark[2]
        if not path.is_file():
            raise SpecError(f"{mark[2]}: is not here any more; drop the file on the page again.")
        return str(path)

    return _MARK.sub(place, text)


def upload(mark: str, folder: Path) -> Path:
    """Path of an uploaded file. Raises SpecError for an unknown upload, and for what is none."""
    if _MARK.fullmatch(mark) is None:
        raise SpecError(f"results: got {mark[:60]!r}; drop the result file on the page.")
    return Path(resolved(mark, folder))


AnyRequest = TypeVar("AnyRequest", bound=CommandRequest)


def with_files(request: AnyRequest, folder: Path) -> AnyRequest:
    """`request` with upload paths; see `resolved`."""

    def placed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(placed, value))
        return resolved(value, folder) if isinstance(value, str) else value

    return replace(request, **{field.name: placed(getattr(request, field.name)) for field in fields(request)})


def hidden(text: str, folder: Path) -> str:
    """`text` with upload paths below `folder` replaced by their names, catalogue paths without their folder."""
    separator = re.escape(os.sep)
    text = re.sub(re.escape(str(folder)) + f"{separator}[0-9a-f]{{16}}{separator}", "", text).replace(str(folder), "")
    return text.replace(f"{PACKAGE / '_data'}{os.sep}", "").replace(f"{PACKAGE.parent}{os.sep}", "")


def without_marks(text: str) -> str:
    """`text` with upload tokens replaced by file names."""
    return _MARK.sub(r"\2", text)


@dataclass(frozen=True, slots=True)
class QueryResult:
    """A query's answer as plain data, which passes between processes. data: the command's `--json`; document: its
    blocks (`perfmodel.report.document.document_json`); files: downloads by name; measured: nearby measurements: label,
    metric, predicted, measured"""

    request: CommandRequest
    data: Any
    document: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    measured: Sequence[Mapping[str, Any]] = ()

    def blocks(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Blocks of some kinds, or all; details expanded in place."""
        flat: list[Mapping[str, Any]] = []
        for block in self.document["blocks"]:
            flat += block["blocks"] if block["kind"] == "details" else [block]
        return [block for block in flat if not kinds or block["kind"] in kinds]


def run_query(request: CommandRequest, console: Console = QUIET, allowed: Sequence[Path] = ()) -> QueryResult:
    """Run a request; `console` gets progress, `allowed` folders are readable. Raises PerfmodelError as its command
    does, and for files elsewhere."""
    from perfmodel.files.sandbox import restrict_paths
    from perfmodel.renderable import to_jsonable
    from perfmodel.report.document import document_json
    from perfmodel.trust import Trust, nearest_rows

    with restrict_paths(allowed):
        answer = request.answer(console)
        assert answer is not None
        files, trust = request.files(answer), getattr(answer.result, "trust", None)
        rows = nearest_rows(trust) if isinstance(trust, Trust) else []
        keys = ("label", "metric", "predicted", "measured")
        measured = [{key: getattr(row, key) for key in keys} for row in rows]
        return QueryResult(request, to_jsonable(answer.data), document_json(answer.document), files, measured)


_MOST = 400
_MAX_BYTES = 50_000_000  # as pickled, which is some fifth of what they take


class ResultCache:
    """Recent answers and refusals, up to `most_bytes`. Thread-safe; closed forms run one at a time."""

    def __init__(self, work_out: Callable[[CommandRequest], QueryResult], most_bytes: int = _MAX_BYTES) -> None:
        self._work_out, self._most_bytes = work_out, most_bytes
        # With what it takes; a refusal is its sentence: an error holds on to the frames that it came through.
        self._kept: OrderedDict[CommandRequest, tuple[QueryResult | str, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock, self._work_lock = Lock(), Lock()

    def find(self, request: CommandRequest) -> QueryResult | None:
        """Cached answer, or None. Raises PerfmodelError for a cached refusal."""
        with self._lock:
            if request not in self._kept:
                return None
            self._kept.move_to_end(request)
            answer, _ = self._kept[request]
        if isinstance(answer, str):
            raise SpecError(answer)
        return answer

    def answer(self, request: CommandRequest) -> QueryResult:
        """Cached answer, else computed here (closed forms only). Raises PerfmodelError as the command does."""
        with self._work_lock:
            result = self.find(request)
            if result is None:
                try:
                    result = self._work_out(request)
                except PerfmodelError as error:
                    self.keep(request, error)
                    raise
                self.keep(request, result)
        return result

    def keep(self, request: CommandRequest, answer: QueryResult | PerfmodelError) -> None:
        """Store a result computed elsewhere."""
        plain = answer if isinstance(answer, QueryResult) else str(answer)
        size = len(pickle.dumps(plain))
        with self._lock:
            self._drop(request)
            self._kept[request] = plain, size
            self._num_bytes += size
            while len(self._kept) > 1 and (len(self._kept) > _MOST or self._num_bytes > self._most_bytes):
                self._drop(next(iter(self._kept)))

    def _drop(self, request: CommandRequest) -> None:
        _, size = self._kept.pop(request, ("", 0))
        self._num_bytes -= size

    def forget_refusals(self) -> None:
        """Forget refusals: a file or memory may be available again."""
        with self._lock:
            for request in [request for request, (answer, _) in self._kept.items() if isinstance(answer, str)]:
                self._drop(request)
