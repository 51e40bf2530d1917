"""`Generation`: the two routes that answer with tokens."""

__all__ = ["Generation", "Models"]

import asyncio
import time

import numpy as np
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from perfmodel.errors import WorkloadError
from perfmodel.listening import ARRIVED
from perfmodel.serve.context import beyond_context
from perfmodel.serve.emulator import Emulator, Order
from perfmodel.serve.http.bodies import ChatBody, CompletionBody
from perfmodel.serve.http.errors import HttpError, not_a_model
from perfmodel.serve.http.faults import BreakingOutlet, FaultDraws
from perfmodel.serve.http.outlet import Outlet
from perfmodel.serve.http.reading import read_json
from perfmodel.serve.http.reply import AskedAnswer, CachedCounts, HttpReply
from perfmodel.serve.http.shapes import AnswerShape
from perfmodel.serve.request_params import RequestParams
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens import AnswerWriter, Vocabulary, block_hashes, chat_prompt
from perfmodel.serve.tokens.vocabulary import TokenIds
from perfmodel.sim.traffic.hashed import hashed

_LONGEST_ID = 128
_MOST_TOKENS = 1 << 20  # of one request: they are written and hashed before anything else is looked at


class Models:
    """What the server's models are called: the one that it emulates, and its adapters."""

    def __init__(self, emulator: Emulator, settings: ServerSettings) -> None:
        self.names = settings.served_names or (emulator.scenario.model.name,)
        self.adapters = settings.lora_names

    def check(self, name: str | None) -> str:
        """`name`, or the first if none is given. Raises HttpError for one that there is not."""
        if not name:
            return self.names[0]
        if name not in self.names and name not in self.adapters:
            raise not_a_model(name)
        return name

    def adapter(self, name: str) -> str | None:
        """The adapter that the model `name` is, if it is one."""
        return name if name in self.adapters else None


class Generation:
    """What answers requests with tokens, of either kind, and counts how many it is answering (`num_open`).

    emulator, settings: what answers; to whom, and how
    vocabulary:         what prompts are counted by
    replica:            as of `Emulator.submit`
    """

    def __init__(
        self, emulator: Emulator, settings: ServerSettings, vocabulary: Vocabulary, replica: int | None
    ) -> None:
        self.num_open = 0
        self._emulator, self._settings, self._vocabulary, self._replica = emulator, settings, vocabulary, replica
        self._models = Models(emulator, settings)
        # Of what falls to requests by their number, which are counted port by port.
        self._stream = settings.seed if replica is None else hashed(settings.seed, replica + 1)
        self._writer = AnswerWriter(
            vocabulary, emulator.scenario.traffic, emulator.max_model_len, settings, self._stream
        )
        self._counts = CachedCounts()
        self._faults = FaultDraws(settings.faults, self._stream)
        self._num_taken = 0
        emulator.observers.append(self._counts)

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """/v1/completions"""
        body = await read_json(scope, receive, self._settings, CompletionBody)
        self._check_number(len(body.prompts) * body.n)
        prompts = [
            self._vocabulary.encode(prompt) if isinstance(prompt, str) else np.array(prompt, dtype=np.int64)
            for prompt in body.prompts
        ]
        await self._answer(body, prompts, scope, receive, send)

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """/v1/chat/completions"""
        body = await read_json(scope, receive, self._settings, ChatBody)
        self._check_number(body.n)
        if len(body.messages) > self._emulator.max_model_len:
            found = f"there are {len(body.messages)} messages"
            raise beyond_context(self._emulator.max_model_len, found, "send fewer")
        prompt = chat_prompt(self._vocabulary, body.conversation, body.add_generation_prompt)
        await self._answer(body, [prompt], scope, receive, send)

    async def _answer(
        self, body: ChatBody | CompletionBody, prompts: list[TokenIds], scope: Scope, receive: Receive, send: Send
    ) -> None:
        model, headers, options = self._models.check(body.model), Headers(scope=scope), body.stream_options
        self._num_taken += 1
        breaks_at = self._faults.check(self._num_taken)
        asked = self._asked(body, prompts, model, headers)
        outlet = Outlet(send)
        if breaks_at is not None:
            outlet = BreakingOutlet(send, 1 + int(breaks_at * sum(len(one.answer.pieces) for one in asked)))
        reply = HttpReply(
            self._emulator,
            self._counts,
            outlet,
            AnswerShape(isinstance(body, ChatBody), self._request_id(headers), int(time.time()), model),
            asked,
            body.stream,
            options is not None and options.include_usage,
            options is not None and options.continuous_usage_stats,
        )
        self.num_open += 1
        try:
            reply.submit(self._replica, scope.get(ARRIVED))
            await _until_gone(receive, outlet)
        finally:
            self.num_open -= 1
            if not reply.is_over:
                reply.abort()

    def _check_number(self, num_answers: int) -> None:
        limit = self._settings.max_answers
        if num_answers > limit:
            said = f"n: found {num_answers} answers (prompts times n), allowed {limit}"
            raise HttpError(400, said, "BadRequestError", "n")

    def _request_id(self, headers: Headers) -> str:
        given = headers.get("x-request-id", "")[:_LONGEST_ID]
        return given or f"{hashed(self._stream, self._num_taken):016x}"

    def _asked(
        self, body: ChatBody | CompletionBody, prompts: list[TokenIds], model: str, headers: Headers
    ) -> list[AskedAnswer]:
        """All answers that are asked for. Raises HttpError for prompts that are too long, or too many tokens in all."""
        session = headers.get("x-session-id") or body.user or None
        wanted = body.wanted()
        asked: list[AskedAnswer] = []
        num_tokens = 0
        for number, prompt in enumerate(prompts):
            for choice in range(body.n):
                try:
                    answer = self._writer.write(wanted, prompt, choice)
                except WorkloadError as error:
                    raise HttpError(400, str(error), "BadRequestError") from None
                ids = np.concatenate([prompt, answer.ids])
                num_tokens += len(ids)
                if num_tokens > _MOST_TOKENS and len(asked):
                    raise HttpError(
                        400,
                        f"the answers asked for have more than {_MOST_TOKENS} tokens with their prompts; ask for fewer",
                        "BadRequestError",
                    )
                known = block_hashes(ids, self._emulator.block_size, body.cache_salt, self._models.adapter(model))
                params = RequestParams(
                    answer.finish_reason,
                    wanted.max_tokens,
                    None if choice else body.n,
                    self._models.adapter(model),
                    ids,
                )
                order = Order(len(prompt), len(answer.ids), known, body.priority, session, params)
                asked.append(AskedAnswer(order, answer, number, choice))
        return asked


async def _until_gone(receive: Receive, outlet: Outlet) -> None:
    """Wait until the client has its answer, or has gone: servers say both in the same way. Or until it breaks."""
    if isinstance(outlet, BreakingOutlet):
        waiting = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(outlet.broken.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
    else:
        await _gone(receive)
    await outlet.drained()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
