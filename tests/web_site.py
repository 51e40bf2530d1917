"""The page in this process, without a socket: its requests, and what stands in its HTML."""

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path

from asgi_client import Client

from perfmodel.web.app import build_app
from perfmodel.web.service import QueryService

HOST = ("host", "127.0.0.1:8080")
HERE = (str(Path(__file__).parents[1]), str(Path.home()), "/tmp/perfmodel", "Traceback", 'File "')


class Site:
    """Answers requests; nobody works in the background unless `desk` was started."""

    def __init__(self, desk=None):
        self.desk = desk or QueryService()
        self.app = build_app("127.0.0.1", self.desk)
        self._token = None

    def close(self):
        self.desk.uploads.close()

    def get(self, path, *headers):
        return asyncio.run(self.send("GET", path, b"", *headers))

    def post(self, path, body=b"", *headers):
        return asyncio.run(self.send("POST", path, body, ("x-perfmodel-token", self.token), *headers))

    async def send(self, method, path, body, *headers):
        own = [] if any(name == "host" for name, _ in headers) else [HOST]
        return await Client(self.app).call(method, path, body, [*own, *headers])

    @property
    def token(self):
        """That its pages carry."""
        if self._token is None:
            self._token = Page(self.get("/deployment").body.decode()).metas["perfmodel-token"]
        return self._token


class Page(HTMLParser):
    """What a page shows.

    cards:   (arguments, figures) of each, a figure being (path, form, value, text)
    plots:   of plotly, as JSON
    figures: outside of cards
    """

    def __init__(self, html):
        super().__init__()
        self.cards, self.figures, self.plots, self.metas, self.tags, self.refusals = [], [], [], {}, [], []
        self.texts, self._figure, self._depth, self._cards, self._refusal = [], None, 0, [], None
        self.feed(html)

    def handle_starttag(self, tag, given):
        attributes = dict(given)
        self.tags.append((tag, attributes))
        if tag == "div":
            self._depth += 1
        if tag == "meta" and "name" in attributes:
            self.metas[attributes["name"]] = attributes["content"]
        if "data-arguments" in attributes:
            self.cards.append((json.loads(attributes["data-arguments"]), []))
            self._cards.append((self._depth, self.cards[-1][1]))
        if "data-figure" in attributes:
            self.plots.append(json.loads(attributes["data-figure"]))
        if tag == "data" and "data-path" in attributes:
            self._figure = [attributes["data-path"], attributes["data-form"], attributes["value"], ""]
        if "refusal" in (attributes.get("class") or ""):
            self.refusals.append("")
            self._refusal = self._depth

    def handle_endtag(self, tag):
        if tag == "data" and self._figure is not None:
            (self._cards[-1][1] if self._cards else self.figures).append(tuple(self._figure))
            self._figure = None
        if tag == "div":
            if self._cards and self._cards[-1][0] == self._depth:
                self._cards.pop()
            if self._refusal == self._depth:
                self._refusal = None
            self._depth -= 1

    def handle_data(self, text):
        self.texts.append(text)
        if self._figure is not None:
            self._figure[3] += text
        if self._refusal is not None:
            self.refusals[-1] += text


def say_nothing_of_here(response):
    """Fail where an answer tells of this machine's folders, or how it came about."""
    text = response.body.decode()
    assert not [word for word in HERE if word in text], text[:500]
