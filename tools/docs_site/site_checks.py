"""What a built site must hold: no link and no anchor leads nowhere, and no page loads anything from another host."""

__all__ = ["BuiltPage", "findings", "read_page"]

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset")}
_LOADING_LINKS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "manifest", "dns-prefetch"}
_FROM_ELSEWHERE = re.compile(r"^(?:https?:)?//")
_IN_STYLES = re.compile(r"(?:url\(\s*[\"']?|@import\s+[\"'])((?:https?:)?//[^\"')]+)")


class BuiltPage(HTMLParser):
    """A page's anchors, the links that a reader can follow, and the addresses that a browser loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        result = {name: value for name, value in attrs if value is not None}
        self.anchors |= {result[name] for name in ("id", "name") if name in result}
        if tag == "a" and "href" in result:
            self.links.append(result["href"])
        if tag == "link" and _LOADING_LINKS & set(result.get("rel", "").split()):
            self.loaded.append(result.get("href", ""))
        self.loaded += [result[name] for name in _LOADED.get(tag, ()) if name in result]


def findings(site: Path) -> list[str]:
    """What is wrong with the site in a folder, a sentence each."""
    site = site.resolve()
    paths = [item for path in sorted(site.rglob("*.html")) for item in _wrong_with(path, site)]
    for path in sorted(site.rglob("*.css")):
        for address in _IN_STYLES.findall(path.read_text(encoding="utf-8")):
            paths.append(f"{path.relative_to(site)} loads {address}")
    return paths


@cache
def read_page(path: Path) -> BuiltPage:
    """A built page, read once."""
    page = BuiltPage()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _wrong_with(path: Path, site: Path) -> list[str]:
    page, name = read_page(path), path.relative_to(site)
    wrong = [f"{name} loads {address}" for address in page.loaded if _FROM_ELSEWHERE.match(address)]
    inner = [link for link in page.links if not urlsplit(link).scheme and not link.startswith("//")]
    local = [address for address in page.loaded if not urlsplit(address).scheme and not address.startswith("//")]
    # The page for what is not there has its links from the root, since it may be shown anywhere.
    base = site if path.name == "404.html" else path.parent
    for link in [*inner, *local]:
        target, anchor = unquote(urlsplit(link).path), unquote(urlsplit(link).fragment)
        there = (base / target.lstrip("/") if path.name == "404.html" else base / target) if target else path
        there = there / "index.html" if there.is_dir() else there
        if not there.is_file():
            wrong.append(f"{name} links to {link}, which is not there")
        elif anchor and there.suffix == ".html" and anchor not in read_page(there).anchors:
            wrong.append(f"{name} links to {link}, which has no such anchor")
    return wrong
