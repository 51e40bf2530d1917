"""What MkDocs calls while it builds the site: pages from outside docs/ and from the code, links, the menu."""

__all__ = ["on_config", "on_files", "on_page_markdown", "on_post_build"]

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "executors"), str(ROOT / "tools")]

from docs_site import generated, notebooks, places  # noqa: E402
from docs_site.dialect import as_mkdocs_reads_it  # noqa: E402
from docs_site.site_checks import findings  # noqa: E402

_ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "reports", "measurements/README.md")
# `DOCS_NOTEBOOKS=0` shows notebooks without running them: a build for tests of everything else.
_RUNS_NOTEBOOKS = os.environ.get("DOCS_NOTEBOOKS", "1") != "0"
_origins: dict[str, str] = {}  # page of the site -> file of the repository that it comes from


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The menu: all techniques."""
    assert config.nav is not None
    config.nav = _entries(config.nav)
    return config


def _entries(listed: list[Any]) -> list[Any]:
    return [_entry(item) for item in listed]


def _entry(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {title: _entries(below) if isinstance(below, list) else _folder(below) for title, below in entry.items()}


def _folder(below: str) -> Any:
    """The pages of a folder that an entry names by a slash at its end, its README first."""
    if not below.endswith("/"):
        return below
    pages = sorted(path.name for path in (ROOT / "docs" / below).glob("*.md"))
    return [below + name for name in sorted(pages, key=lambda name: name != "README.md")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Generated pages, notebooks, and whatever pages link to outside docs/."""
    _origins.clear()
    bodies = generated.pages()
    for file in files.documentation_pages():
        if file.src_uri in bodies:
            file.content_string = generated.filled(file.content_string, bodies[file.src_uri])
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for uri, text in _notebook_pages().items():
        texts[f"docs/{uri}"] = text
        files.append(File.generated(config, uri, content=text))
    _origins.update({origin.removeprefix("docs/"): origin for origin in texts})
    for origin in _outside(texts):
        files.append(_file_of(origin, config))
        _origins[places.place_of(origin)] = origin
    return files


def _notebook_pages() -> dict[str, str]:
    notebook_pages = dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(notebooks.FOLDER.glob("*.ipynb")):
            content = notebooks.executed(path, Path(folder)) if _RUNS_NOTEBOOKS else notebooks.read_notebook(path)
            notebook_pages[f"notebooks/{path.stem}.md"] = notebooks.as_page(content, path.name)
    return notebook_pages


def _outside(texts: dict[str, str]) -> list[str]:
    """Files and folders outside docs/ that are linked from what is on the site, and from those in turn."""
    outside: dict[str, None] = dict.fromkeys(_ALWAYS)
    left = list(texts.items())
    left += [(path, places.shown_page(path)) if path == "reports" else (path, _text(path)) for path in _ALWAYS]
    while left:
        origin, text = left.pop()
        base = f"{origin}/README.md" if (ROOT / origin).is_dir() else origin
        for path in (places.resolved(base, link) for link in places.links_in(text)):
            if not path.startswith("docs/") and path not in outside and (ROOT / path).exists():
                outside[path] = None
                if path.endswith(".md") or (ROOT / path).is_dir():
                    left.append((path, places.shown_page(path) if (ROOT / path).is_dir() else _text(path)))
    return [path for path in outside if not (ROOT / path / "README.md").is_file() or f"{path}/README.md" not in outside]


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _file_of(origin: str, config: MkDocsConfig) -> File:
    place = places.place_of(origin)
    if places.is_copied(origin):
        return File.generated(config, place, abs_src_path=str(ROOT / origin))
    is_page = origin.endswith(".md")
    return File.generated(config, place, content=_text(origin) if is_page else places.shown_page(origin))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text as MkDocs reads it, with links to where things are on the site."""
    uri = page.file.src_uri
    origin = _origins.get(uri, f"docs/{uri}")
    if (ROOT / origin).is_dir():
        origin = f"{origin}/README.md"
    if uri == "index.md":
        markdown = generated.with_questions(markdown)
    if places.is_shown(origin) and not origin.startswith("docs/"):
        return markdown  # code, in which nothing is a link
    return as_mkdocs_reads_it(places.target_text(markdown, origin, uri))


def on_post_build(config: MkDocsConfig) -> None:
    """Raises PluginError where a link or an anchor leads nowhere, or a page loads anything from elsewhere."""
    if wrong := findings(Path(config.site_dir)):
        raise PluginError("the site is not sound:\n" + "\n".join(wrong[:50]))
