"""A scenario against a vLLM server that runs already: the same prompts, at their times, by streaming HTTP. A token's
time is that of the piece of the stream that brings it. A server does not say which steps there were, nor whom it
preempted; hits of its prefix cache only with `--enable-prompt-tokens-details`. A connection for each request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perfmodel.engine import Request
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.sim import Collector, RunResult, Workload
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.traffic.clients import client_of
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.clocks import WallClock
from perfmodel_executors.engines.arguments import sampling_arguments
from perfmodel_executors.engines.results import Progress, summarized
from perfmodel_executors.tokens import TokenStore

_ANSWER_S = 600.0  # without a byte from the server
_HTTP_OK = 200
_LONGEST_LINE = 1 << 24  # of a stream: its first event has the prompt in it


def execute_on_server(
    url: str, scenario: Scenario, progress: Progress | None = None, out: Path | None = None
) -> RunResult:
    """The scenario's traffic, sent to the server at `url`, whose vocabulary holds its tokens; progress, out: as of
    `execute_on`. Raises SpecError for other than http://HOST:PORT, PerfmodelError for no answer or a refusal."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.path.strip("/"):
        raise SpecError(f"--on vllm:{url}: expected vllm:http://HOST:PORT, without a path and without TLS.")
    client = _Client(parts.hostname, parts.port or 80)
    return asyncio.run(_serve(client, scenario, progress, out))


class _Client:
    def __init__(self, host: str, port: int) -> None:
        self.host, self._port = host, port

    @asynccontextmanager
    async def ask(self, method: str, path: str, body: Any = None) -> AsyncIterator[asyncio.StreamReader]:
        """The body of the answer, still to be read. Raises PerfmodelError for another status than 200."""
        text = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\nContent-Length: {len(text)}\r\n"
        try:
            reader, writer = await asyncio.open_connection(self.host, self._port, limit=_LONGEST_LINE)
        except OSError as error:
            raise self._unreachable(error) from None
        try:
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + text)
            status = int((await asyncio.wait_for(reader.readline(), _ANSWER_S)).split()[1])
            while (await reader.readline()).strip():
                pass
            if status != _HTTP_OK:
                reason = " ".join((await reader.read(2000)).decode(errors="replace").split())[:400]
                raise PerfmodelError(f"{method} {path}: the server answers with status {status}: {reason}")
            yield reader
        except (OSError, IndexError, ValueError, TimeoutError) as error:
            raise self._unreachable(error) from None
        finally:
            writer.close()

    def _unreachable(self, error: Exception) -> PerfmodelError:
        return PerfmodelError(
            f"--on vllm:http://{self.host}:{self._port}: no server answers there ({error or 'no answer in time'}); "
            f"start one with `vllm serve MODEL`, or name the one that runs."
        )

    async def get(self, path: str) -> Any:
        async with self.ask("GET", path) as reader:
            data = await reader.read()
        return json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])  # whole, or in one chunk


async def _serve(client: _Client, scenario: Scenario, progress: Progress | None, out: Path | None) -> RunResult:
    cards, adapters = (await client.get("/v1/models"))["data"], scenario.traffic.adapters
    model, names = cards[0]["id"], [card["id"] for card in cards if card.get("parent")]
    if adapters is not None and adapters.count > len(names):
        raise SpecError(
            f"traffic.adapters: got {adapters.count} adapters, and the server lists {len(names)}; start it with "
            f"--enable-lora and all of them in --lora-modules, or lower the count."
        )
    version = str((await client.get("/version")).get("version", ""))
    with Collector(out, has_turns=scenario.traffic.has_conversations) as collector:
        await _Run(client, scenario, (model, names), collector, progress).serve()
    facts = {"versions": {"vllm": version}, "url": f"http://{client.host}", "model": model}
    requests = collector.requests()
    asked, hit = int(requests.num_prompt_tokens.sum()), int(requests.num_cached_tokens.sum())
    totals = {"prefix_tokens_asked": asked, "prefix_tokens_hit": hit}
    note = (
        f"Executed by the server of vLLM {version} at {client.host} with its model {model}; times are those of the "
        f"client. A server has no step records, and does not say whom it preempted."
    )
    result = summarized(scenario, collector, facts, totals)
    return replace(result, steps=None, notes=(*result.notes, note))


class _Run:
    def __init__(
        self,
        client: _Client,
        scenario: Scenario,
        models: tuple[str, list[str]],  # the model, its adapters
        collector: Collector,
        progress: Progress | None,
    ) -> None:
        self._client, self._collector, self._models, self._progress = client, collector, models, progress
        self._workload, self._clock = Workload(scenario), WallClock()
        self._arrivals = client_of(self._clock.env, self._workload, lambda _: self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling = sampling_arguments(scenario)
        ids, has_answers = (
            (scenario.model.vocab_size, scenario.engine.kv_block_tokens),
            not scenario.traffic.has_sessions,
        )
        self._store = TokenStore(*ids, scenario.seed, has_answers=has_answers)

    def add(self, request: Request) -> None:
        """`request` arrives now; one that the engine would refuse is not asked."""
        if self._workload.refuses(request):
            self._arrivals.on_finished(request)
            return
        self._tasks.add(asyncio.create_task(self._ask(request)))

    async def serve(self) -> None:
        clock = self._clock
        while True:
            clock.catch_up()
            due = clock.env.next_tick
            wait = None if due is None else max(0.0, (due - clock.ticks) / TICKS_PER_S)
            if not self._tasks:
                if wait is None:
                    return
                await asyncio.sleep(wait)
                continue
            done, _ = await asyncio.wait(set(self._tasks), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            self._tasks -= done
            for task in done:
                task.result()

    async def _ask(self, request: Request) -> None:
        model, adapters = self._models
        body = {
            "model": model if request.adapter is None else adapters[request.adapter],
            "prompt": self._store.of(request),
            "max_tokens": request.max_output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"priority": request.priority} if request.priority else {}),  # refused without priority scheduling
            **self._sampling,
        }
        request.first_scheduled_at = request.arrival  # a server does not say when
        async with self._client.ask("POST", "/v1/completions", body) as reader:
            last = await self._read(request, reader)
        if request.first_token_at is None:
            raise PerfmodelError(f"request {request.request_id}: the server's stream ended without a token.")
        request.finished_at = last
        self._collector.add_request(request)
        self._collector.end_tick = max(self._collector.end_tick, last)
        self._store.finish(request)
        self._store.release(request)
        self._clock.catch_up()
        self._arrivals.on_finished(request)
        if self._progress is not None:
            self._progress(self._collector.num_finished, self._workload.num_requests)

    async def _read(self, request: Request, reader: asyncio.StreamReader) -> int:
        """The request's stream to its end; the tick of its last token."""
        last = 0
        while line := await asyncio.wait_for(reader.readline(), _ANSWER_S):
            if not line.startswith(b"data: {"):
                continue
            now, event = self._clock.ticks, json.loads(line[6:])
            if "error" in event:
                raise PerfmodelError(f"request {request.request_id}: the server answers: {event['error']}")
            for choice in event.get("choices", ()):
                ids = choice.get("token_ids") or ([0] if choice.get("text") else [])
                if ids and request.num_output_tokens:
                    self._collector.add_gap(now - last)
                elif ids:
                    request.first_token_at = now
                for token in ids:
                    self._store.put(request, request.num_prompt_tokens + request.num_output_tokens, token)
                    request.num_output_tokens += 1
                last = now if ids else last
            if event.get("usage") is not None:
                details = event["usage"].get("prompt_tokens_details") or {}
                request.num_cached_tokens = details.get("cached_tokens") or 0
        return last
