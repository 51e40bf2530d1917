"""Real text: what Python's own help says, which is English and on every machine, or a file."""

__all__ = ["PYDOC", "read_text"]

from pathlib import Path

from perfmodel.errors import SpecError

PYDOC = "pydoc"
# A fixed stretch from the middle of a section: a text's first pages are often titles and lists.
_START, _LENGTH = 20_000, 12_000


def read_text(source: str = PYDOC) -> str:
    """12,000 characters from character 20,000 on, or from the start of a shorter text.

    source: `pydoc` (the topics of `help()`, an empty line between them), or the path of a text file
    """
    if source == PYDOC:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values())
    else:
        try:
            text = Path(source).read_text(encoding="utf-8", errors="ignore")
        except OSError as error:
            raise SpecError(f"--text {source}: {error.strerror or error}; allowed pydoc, or a text file.") from None
    start = _START if len(text) >= _START + _LENGTH else 0
    return text[start : start + _LENGTH]
