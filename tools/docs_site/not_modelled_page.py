"""What the pages say is not modelled, together: one section for each, with a link to it."""

__all__ = ["not_modelled_page"]

import posixpath
import re

from docs_site.places import ROOT

_DOCS = ROOT / "docs"
_PARAGRAPH = re.compile(r"^(?:\*\*)?Not modelled(?:\*\*)?(?P<mark>[.:])(?:\*\*)? *(?P<text>[^\n]+)$", re.MULTILINE)
_SECTION = re.compile(r"^## Not modelled\n+(?P<text>.+?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")


def not_modelled_page() -> str:
    """General pages first, then techniques, each by its title."""
    pages = [*sorted(_DOCS.glob("*.md")), *sorted((_DOCS / "techniques").glob("*.md"))]
    return "\n".join(section for path in pages if (section := _section(path.relative_to(_DOCS).as_posix())))


def _section(page: str) -> str:
    text = (_DOCS / page).read_text(encoding="utf-8")
    said = [match["text"].strip() for pattern in (_PARAGRAPH, _SECTION) for match in pattern.finditer(text)]
    title = _TITLE.search(text)
    if title is None or not said:
        return ""

    def put(match: re.Match[str]) -> str:
        return f"]({posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))})"

    body = "\n\n".join(_LINK.sub(put, paragraph) for paragraph in said)
    return f"## {title[1]}\n\n{body[:1].upper()}{body[1:]} ([the page]({page}))\n"
