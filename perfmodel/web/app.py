"""`build_app`: the ASGI application; `serve_page`: serve it locally until ctrl-C.

Access control: the Host header is checked against DNS rebinding, a token against cross-site forms, and headers forbid
foreign resources and framing."""

import asyncio
import gzip
import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.listening import Bounds, HostCheck, Listening, is_loopback, serve_apps
from perfmodel.web.pages import Pages
from perfmodel.web.results import MAX_BYTES, QueryResult, field_of, upload, without_marks
from perfmodel.web.service import QueryService, read_line, scenario_file, serve_line
from perfmodel.web.state import PACKED, PageState, packed, read_state, unpacked
from perfmodel.web.views import View, ViewPart, find_part, find_view

TOKEN_HEADER = "x-perfmodel-token"

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),  # inline styles: plotly and progress bars set some
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

_HOST = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class PageGuard:
    """token: sent by this server's pages with every state change."""

    def __init__(self, host: str) -> None:
        self._hosts = HostCheck(host)
        self.token = secrets.token_urlsafe(24)

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """(status, sentence) of a refused request; else None."""
        host = ", ".join(request.headers.getlist("host"))
        refusal = self._hosts.refusal(host)
        if refusal is not None or not _HOST.fullmatch(host):
            return 400, f"the request is for {host[:80]!r}; open the page by the address that perfmodel web says."
        if request.method in ("GET", "HEAD"):
            return None
        origin = request.headers.get("origin")
        if origin is not None and origin != f"{request.url.scheme}://{host}":
            return 403, "the request came from another page; only this server's own may ask."
        if not hmac.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), self.token.encode()):
            return 403, "the page is of a server that has ended; load it again."
        return None


_log = logging.getLogger("perfmodel.web")
_PATIENCE_S = 1.5  # wait for a worker before the page is asked to poll
_MAX_LINE_BYTES = 200_000
_PAGE_HEADER, _LONGEST_PAGE = "x-perfmodel-page", 40  # each tab has a name of its own
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
_PLOTLY = "vendor/plotly-basic.min.js"  # all trace types here are bars and lines
_STATIC = (
    *("app.css", "app.js", "choices.css", "choices.js", "columns.js", "files.js", "plots.js", "icon.svg"),
    *("vendor/htmx.min.js", _PLOTLY),
)


def build_app(host: str, desk: QueryService) -> Starlette:
    """ASGI application for `host`; `desk`, already started, answers."""
    return _Site(host, desk).app


class _Site:
    def __init__(self, host: str, desk: QueryService) -> None:
        self._guard, self._desk = PageGuard(host), desk
        self._pages = Pages(desk, self._guard.token)
        routes = [
            Route("/", self._home),
            Route("/static/{path:path}", self._static),
            Route("/part/{view}/{part}", self._part),
            Route("/rest/{view}/{part}", self._rest),
            Route("/ask/{view}/{part}", self._ask, methods=["POST"]),
            Route("/later/{view}/{part}", self._later, methods=["GET", "POST"]),
            Route("/stop/{view}/{part}", self._stop, methods=["POST"]),
            Route("/drop", self._drop, methods=["POST"]),
            Route("/line", self._line, methods=["POST"]),
            Route("/serve-line", self._serve_line),
            Route("/share", self._share),
            Route("/scenario", self._scenario),
            Route("/open", self._open),
            Route("/close", self._close, methods=["POST"]),
            Route("/data/{view}/{part}", self._data),
            Route("/file/{view}/{part}/{name}", self._file),
            Route("/{view}", self._view),
        ]
        middleware = Middleware(BaseHTTPMiddleware, dispatch=self._guarded), Middleware(GZipMiddleware, compresslevel=4)
        handlers = dict.fromkeys((404, 405), self._no_page)
        self.app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def _guarded(self, request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = self._guard.refusal(request)
        if refusal is not None:
            response: Response = self._sentence(request, *refusal)
        else:
            try:
                if page := _page_of(request):
                    self._desk.jobs.see(page)
                response = await go_on(request)
            except PerfmodelError as error:
                response = self._sentence(request, 422, str(error))
            except Exception:
                _log.exception("a page could not be drawn: a bug of perfmodel")
                response = self._sentence(request, 500, "the page could not be drawn: a bug, which the log describes.")
        response.headers.update({name: value for name, value in HEADERS.items() if name not in response.headers})
        response.headers.setdefault("cache-control", "no-store")
        return response

    async def _no_page(self, request: Request, error: Exception) -> Response:
        status = 405 if getattr(error, "status_code", 404) == 405 else 404
        return self._sentence(request, status, f"there is no page {request.scope['path'][:80]!r} to {request.method}.")

    def _sentence(self, request: Request, status: int, sentence: str) -> Response:
        if "text/html" in request.headers.get("accept", "") and "hx-request" not in request.headers:
            return HTMLResponse(self._pages.refused(sentence), status)
        return JSONResponse({"error": sentence}, status)

    async def _home(self, request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"/deployment{query}", 307)

    async def _view(self, request: Request) -> Response:
        view, state = find_view(request.path_params["view"]), read_state(request.url.query)
        if view is None:
            return self._sentence(request, 404, f"there is no page {request.scope['path'][:80]!r}.")
        if request.url.query.startswith(PACKED):
            return RedirectResponse(f"/{view.name}?{unpacked(request.url.query)}", 307)
        return await _drawn(self._pages.page, view, state, request.headers.get("hx-target", ""))

    async def _open(self, request: Request) -> Response:
        """Register an open tab, as any of its requests does."""
        return Response(status_code=204)

    async def _close(self, request: Request) -> Response:
        """A tab closes: soon stop what only it waits for."""
        if page := _page_of(request):
            self._desk.jobs.depart(page)
        return Response(status_code=204)

    async def _part(self, request: Request) -> Response:
        view, part, state = _part_of(request)
        if part.lane is not None:
            with suppress(PerfmodelError):  # shown by the part
                self._desk.join(part.ask(state), _reader_of(request, view, part))
        return await _drawn(self._pages.part, view, part, state)

    async def _rest(self, request: Request) -> Response:
        return await _drawn(self._pages.rest, *_part_of(request))

    async def _ask(self, request: Request) -> Response:
        view, part, state = _part_of(request)
        if part.lane is not None:
            jobs = self._desk.begin(part.ask(state), part.lane, _reader_of(request, view, part))
            waits = [asyncio.create_task(job.ended.wait()) for job in jobs]
            if waits:
                _, late = await asyncio.wait(waits, timeout=_PATIENCE_S)
                for wait in late:
                    wait.cancel()
        return await _drawn(self._pages.part, view, part, state)

    async def _later(self, request: Request) -> Response:
        """Progress of a part's deferred requests; POST starts them."""
        view, part, state = _part_of(request)
        if part.later is not None:
            reader = _reader_of(request, view, part, "/later")
            if request.method == "POST":
                self._desk.begin(part.later(state), "long", reader)
            else:
                self._desk.join(part.later(state), reader)
        return await _drawn(self._pages.later, view, part, state)

    async def _stop(self, request: Request) -> Response:
        view, part, state = _part_of(request)
        for request_ in (*part.ask(state), *(part.later(state) if part.later else ())):
            self._desk.stop(request_)
        return await _drawn(self._pages.part, view, part, state)

    def _answers(self, part: ViewPart, state: PageState) -> list[QueryResult]:
        return [look.shown for request in part.ask(state) if (look := self._desk.look(request)).shown is not None]

    async def _data(self, request: Request) -> Response:
        """JSON of a part's answers, as commands print it."""
        view, part, state = _part_of(request)
        answers = self._answers(part, state)
        if not answers:
            return JSONResponse({"error": "nothing is known of it yet; open the page first."}, 404)
        data = answers[0].data
        if len(part.ask(state)) > 1:
            data = [
                {"command": without_marks(answer.request.line)}
                | (dict(answer.data) if isinstance(answer.data, Mapping) else {"answer": answer.data})
                for answer in answers
            ]
        name = f"perfmodel-{view.name}-{part.name}.json"
        text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        return Response(text, media_type="application/json", headers=_attached(name))

    async def _file(self, request: Request) -> Response:
        """Download of a part's answers; computes nothing."""
        _, part, state = _part_of(request)
        name = request.path_params["name"]
        texts = [answer.files[name] for answer in self._answers(part, state) if name in answer.files]
        if not texts:
            text = f"there is no {name[:80]!r} yet: it comes with the answer; start it first."
            return self._sentence(request, 404, text)
        return Response(texts[0], media_type="application/octet-stream", headers=_attached(name))

    async def _drop(self, request: Request) -> Response:
        name, size = request.query_params.get("name", ""), request.query_params.get("size", "")
        content = await _body(request, MAX_BYTES)
        mark = self._desk.take(name, content, _num_bytes(size))
        field = await run_in_threadpool(field_of, name, content, upload(mark, self._desk.uploads.folder))
        return JSONResponse({"mark": mark, "field": field})

    async def _line(self, request: Request) -> Response:
        text = (await _body(request, _MAX_LINE_BYTES)).decode("utf-8", "replace")
        state = read_state(request.url.query)
        state, notes = await run_in_threadpool(read_line, text, state, self._desk.uploads.folder)
        return JSONResponse({"query": state.query, "notes": list(notes)})

    async def _serve_line(self, request: Request) -> Response:
        state = read_state(request.url.query)
        return JSONResponse({"lines": await run_in_threadpool(serve_line, state, self._desk.uploads.folder)})

    async def _share(self, request: Request) -> Response:
        """The query of a link to the state."""
        return JSONResponse({"query": packed(request.url.query)})

    async def _scenario(self, request: Request) -> Response:
        """The deployment as a scenario file."""
        state = read_state(request.url.query)
        name, text = await run_in_threadpool(scenario_file, state, self._desk.uploads.folder)
        return Response(text, media_type="application/yaml", headers=_attached(name))

    async def _static(self, request: Request) -> Response:
        path = request.path_params["path"]
        if path not in _STATIC:
            return JSONResponse({"error": "there is no such file."}, 404)
        content, tag = await run_in_threadpool(_packaged, path)
        headers = {"etag": tag, "cache-control": "no-cache"}
        headers |= {"content-encoding": "gzip"} if path == _PLOTLY else {}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=_KINDS[f".{path.rpartition('.')[2]}"], headers=headers)


async def _drawn(draw: Callable[..., str], *places: Any) -> Response:
    return HTMLResponse(await run_in_threadpool(draw, *places))


def _part_of(request: Request) -> tuple[View, ViewPart, PageState]:
    view = find_view(request.path_params["view"])
    part = None if view is None else find_part(view, request.path_params["part"])
    if view is None or part is None:
        raise SpecError("there is no such part of the page; load it again.")
    return view, part, read_state(request.url.query)


def _page_of(request: Request) -> str:
    """Name of the tab; "" if missing or invalid."""
    name = request.headers.get(_PAGE_HEADER, "")[:_LONGEST_PAGE]
    return name if name.isalnum() else ""


def _reader_of(request: Request, view: View, part: ViewPart, suffix: str = "") -> str:
    """Reader id of a part, see `BackgroundJob`."""
    page = _page_of(request)
    return f"{page}/{view.name}/{part.name}{suffix}" if page else ""


async def _body(request: Request, most: int) -> bytes:
    """Request body. Raises SpecError beyond `most` bytes, before reading all."""
    length, content = _num_bytes(request.headers.get("content-length", "")), bytearray()
    if length is not None and length > most:
        raise SpecError(f"{length:,} bytes are sent; expected at most {most:,}.")
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise SpecError(f"more than {most:,} bytes were sent; expected at most {most:,}.")
    return bytes(content)


def _num_bytes(text: str) -> int | None:
    """Content length of up to 18 digits (above any limit), or None."""
    return int(text[:18]) if text.isascii() and text.isdigit() else None


def _attached(name: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{name}"'}


@cache
def _packaged(path: str) -> tuple[bytes, str]:
    """(file, etag); plotly's script is compressed once."""
    content = files("perfmodel.web").joinpath("static", *path.split("/")).read_bytes()
    content = gzip.compress(content, 9, mtime=0) if path == _PLOTLY else content
    return content, f'"{hashlib.sha256(content).hexdigest()[:20]}"'


_DRAIN_S = 1.0  # pages ask again
_BOUNDS = Bounds(max_connections=256)


def serve_page(host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until interrupted; `port` 0: any free one; `on_ready` is called with the page's address. Raises SpecError
    for an unavailable port, and for a host that other machines can reach: visitors may start work and read uploads."""
    if not is_loopback(host):
        raise SpecError(f"--host: got {host!r}; expected this machine's own, as 127.0.0.1, ::1 or localhost.")
    asyncio.run(_serve(host, port, on_ready))


async def _serve(host: str, port: int, on_ready: Callable[[str], None]) -> None:
    name = f"[{host}]" if ":" in host else host
    desk = QueryService()
    try:
        await desk.start()
        apps = [Listening(build_app(host, desk), port)]
        say_address = lambda ports: on_ready(f"http://{name}:{ports[0]}")  # noqa: E731
        await serve_apps(apps, host, _BOUNDS, _DRAIN_S, on_ready=say_address)
    finally:
        await desk.close()
