"""`Generation`: the routes that answer with tokens."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from perfmodel.errors import WorkloadError
from perfmodel.listening import ARRIVED
from perfmodel.serve import tokens
from perfmodel.serve.emulator import Emulator, Order, RequestParams, beyond_context
from perfmodel.serve.http.bodies import (
    BatchBody,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    ScoringBody,
)
from perfmodel.serve.http.other_apis import CountBody, MessagesBody, MessagesShape, ResponsesBody, ResponsesShape
from perfmodel.serve.http.reading import Body, HttpError, checked, in_style, not_a_model, read_any, read_json
from perfmodel.serve.http.reply import BreakingOutlet, CachedCounts, FaultDraws, HttpReply, Outlet
from perfmodel.serve.http.shapes import (
    AnswerSet,
    AnswerShape,
    AskedAnswer,
    ChatShape,
    CompletionShape,
    EmbeddingShape,
    ScoringShape,
)
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens import ByteTokens, ChatMessage, FileTokens, TokenIds
from perfmodel.sim.traffic.distributions import hashed

_LONGEST_ID = 128
_MAX_TOKENS = 1 << 20  # of one request: they are written and hashed before anything else is looked at


class Call(NamedTuple):
    """What an ASGI application is called with."""

    scope: Scope
    receive: Receive
    send: Send


_Generated = TypeVar("_Generated", bound=GenerationBody)
_ShapeOf = Callable[[_Generated, AnswerSet], AnswerShape]


class Generation:
    """What answers requests with tokens, of any kind, and counts how many it is answering (`num_open`).

    emulator, settings: what answers; to whom, and how
    replica:            as of `Emulator.submit`

    Raises SpecError for a tokenizer file that cannot be read."""

    def __init__(self, emulator: Emulator, settings: ServerSettings, replica: int | None) -> None:
        self.num_open = 0
        vocabulary = ByteTokens() if settings.tokenizer_file is None else FileTokens(settings.tokenizer_file)
        self._emulator, self._settings, self._replica = emulator, settings, replica
        self._vocabulary = tokens.BoundedTokens(vocabulary, emulator.max_model_len)
        self._names = settings.served_names or (emulator.scenario.model.name,)  # of the model, its own first
        # Of what falls to requests by their number, which are counted port by port.
        self._stream = settings.seed if replica is None else hashed(settings.seed, replica + 1)
        traffic, longest = emulator.scenario.traffic, emulator.max_model_len
        self._writer = tokens.AnswerWriter(self._vocabulary, traffic, longest, settings, self._stream)
        self._counts = CachedCounts()
        self._faults = FaultDraws(settings.faults, self._stream)
        self._num_taken = 0
        emulator.observers.append(self._counts)

    async def complete(self, call: Call) -> None:
        """/v1/completions"""
        body = await self._read(call, CompletionBody)
        await self._complete(body, self._model(body.model), call)

    async def _complete(self, body: CompletionBody, model: str, call: Call) -> None:
        await self._answer(body, [self._ids(prompt) for prompt in body.prompts], model, CompletionShape, call)

    async def chat(self, call: Call) -> None:
        """/v1/chat/completions"""
        body = await self._read(call, ChatBody)
        await self._chat(body, self._model(body.model), ChatShape, call)

    async def _chat(self, body: ChatBody, model: str, shape_of: _ShapeOf[ChatBody], call: Call) -> None:
        await self._answer(body, [self._prompt(body.conversation, body.add_generation_prompt)], model, shape_of, call)

    async def batch(self, call: Call) -> None:
        """/v1/chat/completions/batch, which has no stream"""
        body = (await self._read(call, BatchBody)).model_copy(update={"stream": False})
        model, prompts = self._model(body.model), [self._prompt(messages) for messages in body.conversations]
        await self._answer(body, prompts, model, ChatShape, call)

    async def respond(self, call: Call) -> None:
        """/v1/responses"""
        body = await self._read(call, ResponsesBody)
        model = self._model(body.model)
        await self._chat(checked(body.chat), model, partial(ResponsesShape, body), call)

    async def message(self, call: Call) -> None:
        """/v1/messages"""
        body = await self._read(call, MessagesBody)
        with in_style("anthropic"):
            model = self._model(body.model)
            await self._chat(checked(body.chat), model, MessagesShape, call)

    async def count_tokens(self, call: Call) -> None:
        """/v1/messages/count_tokens"""
        body = await self._read(call, CountBody)
        with in_style("anthropic"):
            self._model(body.model)
            count = len(self._prompt(checked(body.chat).conversation))
        counted = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        await JSONResponse(counted)(*call)

    async def invoke(self, call: Call) -> None:
        """/invocations, of SageMaker: a chat or a completion, of whatever model"""
        data, model = await read_any(call.scope, call.receive, self._settings), self._names[0]
        if not isinstance(data, dict):
            raise HttpError(400, "body: expected an object, of a chat or a completion", "BadRequestError")
        if "messages" in data:
            await self._chat(checked(lambda: ChatBody.model_validate(data)), model, ChatShape, call)
        else:
            await self._complete(checked(lambda: CompletionBody.model_validate(data)), model, call)

    async def score(self, call: Call) -> None:
        """/generative_scoring: each item with the query is a prompt, for one token"""
        body = await self._read(call, ScoringBody)
        body = body.model_copy(update={"stream": False})  # scores are not streamed; vLLM's request has no such field
        model = self._model(body.model)
        if max(body.label_token_ids or ()) >= self._vocabulary.size:
            raise HttpError(400, "label_token_ids: got one that is not in the vocabulary", "BadRequestError")
        prompts = [np.concatenate([self._ids(part) for part in parts]) for parts in body.parts]
        await self._answer(body, prompts, model, ScoringShape, call)

    async def embed(self, call: Call) -> None:
        """/v1/embeddings: each prompt gets a vector when its last step is over"""
        body = (await self._read(call, EmbeddingBody)).model_copy(update={"stream": False})
        size = self._emulator.scenario.model.hidden_size
        prompts = [self._ids(prompt) for prompt in body.prompts]
        await self._answer(body, prompts, self._model(body.model), partial(EmbeddingShape, size), call)

    def _model(self, name: str | None) -> str:
        """`name`, or the first if none is given. Raises HttpError for one that there is not."""
        if name and name not in self._names and name not in self._settings.lora_names:
            raise not_a_model(name)
        return name or self._names[0]

    async def _read(self, call: Call, kind: type[Body]) -> Body:
        return await read_json(call.scope, call.receive, self._settings, kind)

    def _ids(self, prompt: str | list[int]) -> TokenIds:
        """Token ids of a text, or those that are given. Raises HttpError for one that the vocabulary does not have."""
        if isinstance(prompt, str):
            return self._vocabulary.encode(prompt)
        if max(prompt) >= self._vocabulary.size:
            raise HttpError(400, f"prompt: got token {max(prompt)}, which the vocabulary lacks", "BadRequestError")
        return np.array(prompt, dtype=np.int64)

    def _prompt(self, conversation: list[ChatMessage], has_answer: bool = True) -> TokenIds:
        if len(conversation) > self._emulator.max_model_len:
            number = f"there are {len(conversation)} messages"
            raise self._too_long(beyond_context(self._emulator.max_model_len, number, "send fewer"))
        try:
            return tokens.chat_prompt(self._vocabulary, conversation, has_answer)
        except WorkloadError as error:
            raise self._too_long(error) from None

    def _too_long(self, error: WorkloadError) -> HttpError:
        param = "max_tokens" if isinstance(error, tokens.LimitError) else "input_tokens"
        return HttpError(400, str(error), "BadRequestError", param)

    async def _answer(
        self, body: _Generated, prompts: list[TokenIds], model: str, shape_of: _ShapeOf[_Generated], call: Call
    ) -> None:
        """Answer `prompts`, in the shape that `shape_of` makes of the request and its answers."""
        served = self._emulator.scenario.model
        if (served.pooling is not None) != isinstance(body, EmbeddingBody) or served.num_labels:  # no such path there
            raise HttpError(404, "Not Found", style="detail")
        limit, num_answers = self._settings.max_answers, len(prompts) * body.n
        if num_answers > limit:
            text = f"n: got {num_answers} answers (prompts times n); expected at most {limit}"
            raise HttpError(400, text, "BadRequestError", "n")
        if any(not name.isdecimal() or int(name) >= self._vocabulary.size for name in body.logit_bias or ()):
            raise HttpError(400, "logit_bias: got a token that the vocabulary lacks", "BadRequestError", "logit_bias")
        headers = Headers(scope=call.scope)
        self._num_taken += 1
        breaks_at = self._faults.check(self._num_taken)
        adapter = model if model in self._settings.lora_names else None
        asked = self._asked(body, prompts, adapter, headers.get("x-session-id"))
        outlet = Outlet(call.send)
        if breaks_at is not None:
            outlet = BreakingOutlet(call.send, 1 + int(breaks_at * sum(len(one.answer.pieces) for one in asked)))
        request_id = headers.get("x-request-id", "")[:_LONGEST_ID] or f"{hashed(self._stream, self._num_taken):016x}"
        shape = shape_of(body, AnswerSet(request_id, int(time.time()), model, self._vocabulary, asked))
        reply = HttpReply(self._emulator, self._counts, outlet, shape, body, asked)
        self.num_open += 1
        try:
            reply.submit(self._replica, call.scope.get(ARRIVED))
            await _until_gone(call.receive, outlet)
        finally:
            self.num_open -= 1
            if not reply.is_over:
                reply.abort()

    def _asked(
        self, body: GenerationBody, prompts: list[TokenIds], adapter: str | None, session: str | None
    ) -> list[AskedAnswer]:
        """All answers that are asked for. Raises HttpError for prompts that are too long, or too many tokens in all."""
        wanted, salt, longest = body.wanted(), body.cache_salt, self._emulator.max_model_len
        if body.prompt_logprobs is not None or (body.echo and body.num_logprobs is not None):
            # Cached tokens have no logprobs, so vLLM does not read such prompts from the prefix cache
            # (SamplingParams.skip_reading_prefix_cache). Here later requests do not reuse their blocks, either.
            salt = f"{salt}/prompt logprobs of {self._num_taken}"
        if (most := body.truncate_prompt_tokens) is not None:
            if most > longest:
                text = f"truncate_prompt_tokens: got {most}; expected at most {longest}"
                raise HttpError(400, text, "BadRequestError", "truncate_prompt_tokens")
            most = longest - 1 + wanted.is_vector if most < 0 else most
            prompts = [prompt[max(len(prompt) - most, 0) :] for prompt in prompts]
        asked: list[AskedAnswer] = []
        num_tokens = 0
        for prompt, choice in product(prompts, range(body.n)):
            try:
                answer = self._writer.write(wanted, prompt, choice)
            except WorkloadError as error:
                raise self._too_long(error) from None
            ids = np.concatenate([prompt, answer.ids])
            num_tokens += len(ids)
            if num_tokens > _MAX_TOKENS and asked:
                text = f"the answers asked for have more than {_MAX_TOKENS} tokens with their prompts; ask for fewer"
                raise HttpError(400, text, "BadRequestError")
            blocks, n = tokens.block_hashes(ids, self._emulator.block_size, salt, adapter), None if choice else body.n
            params = RequestParams(answer.finish_reason, wanted.max_tokens, n, adapter, ids)
            order = Order(len(prompt), len(answer.ids), blocks, body.priority, session or body.user or None, params)
            asked.append(AskedAnswer(order, answer, choice))
        return asked


async def _until_gone(receive: Receive, outlet: Outlet) -> None:
    """Wait until the client has its answer, or has gone: servers say both in the same way. Or until it breaks."""
    if isinstance(outlet, BreakingOutlet):
        waiting = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(outlet.broken.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
    else:
        await _gone(receive)
    await outlet.drained()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
