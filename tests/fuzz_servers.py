"""Fuzzed requests to the page and the emulator in this process, and what is wrong with the responses.

A response is right if it is complete, has a status below 500 and contains no traceback and no local path. The page
runs the work of its workers in this thread, so that time limits apply to it.
"""

__all__ = ["run_request", "traced"]

import asyncio
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlencode

from asgi_client import Client, Response
from fuzz_scenarios import FuzzCase
from virtual_time import VirtualLoop

_SMALL = (  # for short responses of the emulator
    "engine.max_model_len=256",
    "traffic.input_tokens={distribution: fixed, value: 100}",
    "traffic.output_tokens={distribution: fixed, value: 20}",
)
_TOKEN = "x-perfmodel-token"
_USES = ("/part/memory/plan", "/part/deployment/glance", "/part/step/decode")  # of an uploaded file


def run_request(case: FuzzCase) -> tuple[int, str]:
    """The status of the response, and what is wrong with it."""
    server, method, target, *lines = case.args
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    return {"page": _on_page, "emulator": _on_emulator}[server](method, target, case.files["body"], headers)


def traced(error: BaseException) -> str:
    """An error and the line of the package that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ([frame for frame in frames if "/perfmodel/" in frame.filename] or frames)[-1]
    return f"{type(error).__name__} at {'/'.join(Path(place.filename).parts[-3:])}:{place.lineno}: {error}"


def _wrong(response: Response, folders: tuple[str, ...] = ()) -> str:
    text = response.body.decode("utf-8", "replace")
    if response.status is None or response.status >= 500:
        return f"status {response.status}: {text[:160]}"
    if not response.is_complete:
        return "an incomplete response"
    leaks = [word for word in ("Traceback", 'File "', *folders) if word in text]
    return f"{leaks[0]} in a response" if leaks else ""


# ---------------------------------------------------------------------------------------------------------- the page


@cache
def _site() -> Any:
    from web_site import Site

    from perfmodel.web.service import QueryService

    class InlineService(QueryService):
        """Runs the work of a worker here."""

        def begin(self, questions: Any, lane: str, reader: str = "") -> list[Any]:
            for question in questions:
                self.answer(question)
            return []

    return Site(InlineService())


async def _inline(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _on_page(method: str, target: str, body: bytes, headers: list[tuple[str, str]]) -> tuple[int, str]:
    """An accepted upload is used in three queries, as on the page."""
    from web_site import HERE

    site, faults = _site(), []
    given = headers if any(name == _TOKEN for name, _ in headers) else [*headers, (_TOKEN, site.token)]

    def keep(*_: object) -> None:
        error = sys.exception()
        faults.extend([traced(error)] if error is not None else [])

    with patch("perfmodel.web.app.run_in_threadpool", _inline), patch("perfmodel.web.app._log.exception", keep):
        response = asyncio.run(site.send(method, target, body, *given))
        wrong = _wrong(response, HERE[:3])
        if target.startswith("/drop") and response.status == 200:
            upload = response.json()
            for path in _USES:
                wrong = wrong or _wrong(site.get(f"{path}?{urlencode({upload['field']: upload['mark']})}"), HERE[:3])
    return response.status or -1, " ".join([wrong, *faults[:1]]).strip()


# ------------------------------------------------------------------------------------------------------- the emulator


@cache
def _emulator() -> tuple[asyncio.Runner, Client, Any]:
    from perfmodel.serve import Emulator
    from perfmodel.serve.http import build_app
    from perfmodel.serve.settings import ServerSettings
    from perfmodel.specs import load_scenario

    runner = asyncio.Runner(loop_factory=VirtualLoop)

    async def started() -> Emulator:
        emulator = Emulator(load_scenario("llama-3.1-8b-a100", _SMALL))
        emulator.start()
        return emulator

    emulator = runner.run(started())
    return runner, Client(build_app(emulator, ServerSettings(max_answers=8))), emulator


def _on_emulator(method: str, target: str, body: bytes, headers: list[tuple[str, str]]) -> tuple[int, str]:
    """Errors state their status and a message; no request remains in flight."""
    runner, client, emulator = _emulator()
    try:
        response = runner.run(client.call(method, target, body, headers=headers))
    except BaseException:
        _emulator.cache_clear()
        raise
    wrong = _wrong(response)
    if not wrong and response.status >= 400 and method != "HEAD":
        answer = response.json()
        error = answer.get("error", {})
        has_message = bool((answer.get("detail") or error.get("message", "")).strip())
        wrong = (
            ""
            if has_message and error.get("code", response.status) == response.status
            else f"an error without a message: {answer}"
        )
    if emulator.num_under_way:
        wrong = wrong or f"{emulator.num_under_way} requests in flight after the response"
    return response.status or -1, wrong
