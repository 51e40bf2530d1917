"""Where a file of the repository stands on the site.

Pages of docs/ link to each other, and to files outside docs/, by relative paths: that is how the code host shows them.
What is linked outside docs/ comes along: Markdown as a page, pictures and data as they are, code and YAML as a page
that shows them, a folder as the list of its files.
"""

__all__ = ["ROOT", "is_copied", "is_shown", "links_in", "place_of", "resolved", "shown_page", "target_text"]

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HOME = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_OUTSIDE = "repository"
_COPIED = {".svg", ".png", ".json", ".gz", ".csv"}
_LEXERS = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml"}
_LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")


def links_in(markdown: str) -> Iterator[str]:
    """Relative links of a text, without their anchors."""
    for _, target, _ in _LINK.findall(markdown):
        if not re.match(r"[a-z]+:|#|/", target):
            yield target.partition("#")[0]


def resolved(origin: str, link: str) -> str:
    """The path from the root of what `link` in the file `origin` names; links to folders may end in a slash."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def place_of(path: str) -> str:
    """Where a file or folder of the repository stands among the site's sources, by its path from the root."""
    if path in _HOME:
        return _HOME[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    here = ROOT / path
    if here.is_dir():
        return posixpath.join(_OUTSIDE, path, "README.md")
    return posixpath.join(_OUTSIDE, path) + (".md" if is_shown(path) else "")


def is_copied(path: str) -> bool:
    """Whether a file comes along as it is."""
    return Path(path).suffix in _COPIED


def is_shown(path: str) -> bool:
    """Whether a file comes along as a page that shows its text."""
    return not is_copied(path) and not path.endswith((".md", ".ipynb")) and not (ROOT / path).is_dir()


def shown_page(path: str) -> str:
    """The Markdown of a page that shows a text file, or lists a folder."""
    here = ROOT / path
    if here.is_dir():
        if (here / "README.md").is_file():
            return (here / "README.md").read_text(encoding="utf-8")
        return f"# {path}/\n\n" + "".join(_line_of(item) for item in sorted(here.iterdir()))
    lexer = _LEXERS.get(here.suffix, "text")
    return f"# {path}\n\n~~~~~~{lexer}\n{here.read_text(encoding='utf-8').rstrip()}\n~~~~~~\n"


def _line_of(path: Path) -> str:
    is_page = path.suffix == ".md"
    return f"- [{path.name}]({path.name})\n" if is_page else f"- `{path.name}{'/' if path.is_dir() else ''}`\n"


def target_text(markdown: str, origin: str, page: str) -> str:
    """`markdown` of the repository's file `origin` with its links as the site's `page` needs them."""

    def put(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        place = place_of(resolved(origin, path))
        return f"{before}{posixpath.relpath(place, posixpath.dirname(page) or '.')}{mark}{anchor}{after}"

    return _LINK.sub(put, markdown)
