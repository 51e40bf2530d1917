"""Markdown as code hosts read it, put so that MkDocs' parser reads the same.

Python-Markdown wants four spaces before what is nested in a list, and an empty line before a list; code hosts do not.
Comments, which mark figures for their tests, are left out. What stands between fences stays as it is.
"""

__all__ = ["as_mkdocs_reads_it", "outside_fences"]

import re
from collections.abc import Callable

_FENCED = re.compile(r"(^(?P<fence>```+|~~~~+)[^\n]*\n.*?^(?P=fence)[ ]*$\n?)", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"^(?P<indent> *)(?:[-*]|\d+\.) ")


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """`markdown` with what is not between fences changed."""
    parts, at = [], 0
    for match in _FENCED.finditer(markdown):
        parts += [change(markdown[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*parts, change(markdown[at:])])


def as_mkdocs_reads_it(markdown: str) -> str:
    """The text with its comments left out and its lists as Python-Markdown wants them."""
    return outside_fences(markdown, _rewritten)


def _rewritten(text: str) -> str:
    lines: list[str] = []
    depth = 0  # of the innermost item, in spaces as written
    for line in re.sub(r"^<!--.*?-->\n?", "", text, flags=re.DOTALL | re.MULTILINE).split("\n"):
        item = _ITEM.match(line)
        if item and lines and lines[-1].strip() and not _ITEM.match(lines[-1]) and not lines[-1].startswith(" "):
            lines.append("")
        if item:
            depth = len(item["indent"])
        elif line.strip() and not line.startswith(" "):
            depth = 0
        lines.append("    " + line.lstrip() if item and 0 < depth < 4 else line)
    return "\n".join(lines)
