"""`--report FILE`: a document, its pictures and its JSON, as files beside each other."""

__all__ = ["write_document", "write_files"]

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError


def write_document(
    path: Path,
    document: Any,
    pictures: Mapping[str, str],
    markdown: Callable[[Sequence[str]], str],
    html: Callable[[], str],
) -> list[Path]:
    """Write FILE.md (`markdown` of its pictures' files) with FILE.*.svg, or FILE.html, and FILE.json beside it; returns
    the files. Raises SpecError for another ending, or where nothing can be written."""
    if path.suffix not in (".md", ".html"):
        raise SpecError(f"--report {path}: allowed a file ending in .md or .html; its .json gets the same name.")
    texts = {path.with_suffix(".json"): json.dumps(document, indent=1, ensure_ascii=False) + "\n"}
    if path.suffix == ".md":
        texts |= {path.with_suffix(f".{name}.svg"): svg for name, svg in pictures.items()}
        texts[path] = markdown([f"{path.stem}.{name}.svg" for name in pictures])
    else:
        texts[path] = html()
    return write_files(path, texts)


def write_files(path: Path, texts: Mapping[Path, str]) -> list[Path]:
    """Write `texts`, of which `path` is the one that was asked for; returns the files, that one first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--report {path}: cannot be written: {error.strerror}.") from None
    return [path, *(file for file in texts if file != path)]
