"""`HttpReply`: one request for answers, from its submission to its last byte; faults that are injected into it.

A task that is woken for each token costs as much as the token. So what `send` returns is turned by an `Outlet` until it
is done, which it is without waiting while the client reads as fast as tokens come. Where it does not, the rest is left
to a task, and what comes meanwhile waits behind it."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Generator, Mapping
from json.encoder import encode_basestring_ascii
from math import ceil
from typing import Any, cast

from starlette.types import Message, Send

from perfmodel.engine import Request
from perfmodel.errors import WorkloadError
from perfmodel.serve.emulator import Emulator, Fate, Observer
from perfmodel.serve.http.bodies import GenerationBody
from perfmodel.serve.http.reading import HttpError, error_body
from perfmodel.serve.http.shapes import AnswerShape, AskedAnswer, TokenCounts
from perfmodel.serve.settings import InjectedFaults
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.distributions import Shares, uniform_draws


class Outlet:
    """Sends over `send`, in order."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin an answer."""
        self._put({"type": "http.response.start", "status": status, "headers": headers})
        self._send = getattr(self._send, "after_start", self._send)  # who notes beginnings need not see each token

    def body(self, data: bytes, is_last: bool = False) -> None:
        """Go on with it."""
        self._put({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def drained(self) -> None:
        """Wait until all is sent."""
        if self._task is not None:
            await self._task

    def _put(self, message: Message) -> None:
        if self._task is not None:
            self._waiting.append(message)
            return
        sending = cast(Coroutine[Any, Any, None], self._send(message))  # to look would cost more than to call
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        self._task = asyncio.get_running_loop().create_task(self._catch_up(_Suspended(sending, awaited)))

    async def _catch_up(self, suspended: "_Suspended") -> None:
        await suspended
        while self._waiting:
            await self._send(self._waiting.popleft())
        self._task = None


class _Suspended:
    """A coroutine that waits for `awaited`, to be awaited from there on."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._awaited
        yield from self._coroutine.__await__()


class FaultDraws:
    """Draws with `seed` which requests fail, and how: each by its number."""

    def __init__(self, faults: InjectedFaults, seed: int) -> None:
        self._kinds, self._seed = faults.kinds, seed
        self._shares = Shares([faults.rate / len(faults.kinds)] * len(faults.kinds), seed, "faults")
        self._is_on = faults.rate > 0

    def check(self, number: int) -> float | None:
        """Where the answer to request `number` breaks, as a share of it; None: it does not.

        Raises HttpError for one that is to fail at once."""
        place = self._shares.of(number) if self._is_on else len(self._kinds)
        if place == len(self._kinds):
            return None
        if self._kinds[place] == "429":
            again = {"retry-after": "1"}
            raise HttpError(429, "too many requests, says --fail; try again", "RateLimitError", headers=again)
        if self._kinds[place] == "500":
            raise HttpError(500, "the engine has failed, says --fail", "InternalServerError")
        return float(uniform_draws(self._seed, number, 1)[0])


class BreakingOutlet(Outlet):
    """Sends `num_parts` parts of an answer over `send`, but of a whole one only half; `broken` is set then."""

    def __init__(self, send: Send, num_parts: int) -> None:
        super().__init__(send)
        self.broken = asyncio.Event()
        self._left = num_parts

    def body(self, data: bytes, is_last: bool = False) -> None:
        """Go on with the answer, if it is not broken."""
        if self.broken.is_set():
            return
        self._left -= 1
        if is_last:
            data, self._left = data[: len(data) // 2], 0
        super().body(data)
        if self._left <= 0:
            self.broken.set()


_DONE = b"data: [DONE]\n\n"
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_LOST = {
    "failed": HttpError(503, "the deployment has refused or lost the request; try again", "ServiceUnavailableError"),
    "timed_out": HttpError(504, "the deployment had no answer before the request's deadline", "GatewayTimeoutError"),
}


class CachedCounts(Observer):
    """Prompt tokens that prefix caches had, of the answers that are waited for here, by their numbers (`choices`)."""

    def __init__(self) -> None:
        self.choices: dict[int, _Choice] = {}

    def on_finished(self, engine: EngineRank, request: Request) -> None:
        choice = self.choices.get(request.request_id)
        if choice is not None:
            choice.num_cached_tokens = request.num_cached_tokens


class HttpReply:
    """Answers on their way to one client.

    emulator, counts: whose answers they are; what caches had of them
    outlet, shape:    over which they are sent, and how they are written
    body, asked:      the request, and all that it asks for, in the order of their indices"""

    def __init__(
        self,
        emulator: Emulator,
        counts: CachedCounts,
        outlet: Outlet,
        shape: AnswerShape,
        body: GenerationBody,
        asked: list[AskedAnswer],
    ) -> None:
        self.emulator, self.counts, self.outlet, self.shape = emulator, counts, outlet, shape
        self.is_streamed, self.with_counts = body.stream, body.options.continuous_usage_stats
        self.is_over = self._has_begun = False  # nothing more is to be sent; a stream has begun
        self._choices = [_Choice(self, one, index) for index, one in enumerate(asked)]
        self._num_open = len(asked)

    def submit(self, replica: int | None, arrived: float | None) -> None:
        """Send all that is asked for to the emulator; both as of its `submit`."""
        try:
            for choice in self._choices:
                if not self.is_over:
                    choice.submit(replica, arrived)
        except WorkloadError as error:
            self._fail(HttpError(400, str(error), "BadRequestError"))
        if self.is_streamed:
            self.emulator.clock.catch_up()  # what is refused is known by now, and needs no stream
            if not self.is_over:
                self.begin()

    def begin(self) -> None:
        """Say that a stream follows, if that was not said: tokens may come before all is submitted."""
        if not self._has_begun:
            self._has_begun = True
            self.outlet.start(200, _EVENTS)
            if self.shape.preamble:
                self.outlet.body(self.shape.preamble)

    def abort(self) -> None:
        """Nobody waits any more."""
        self.is_over = True
        for choice in self._choices:
            choice.abort()

    def finish_one(self) -> None:
        """One of the answers is complete."""
        self._num_open -= 1
        if self._num_open or self.is_over:
            return
        self.is_over = True
        if self.is_streamed:
            done = _DONE if self.shape.has_done else b""
            self.outlet.body(self.shape.closing(self._usage()) + done, is_last=True)
        else:
            self._send_whole(200, self.shape.whole(self._usage()), {})

    def lose(self, fate: Fate) -> None:
        """The deployment has lost one of them, and so all."""
        if self.is_over:
            return
        error = _LOST.get(fate)
        if error is None:
            after = {"retry-after": str(max(ceil(self.emulator.rate_limited_for_s), 1))}
            text = "more requests than the gateway's rate_limit; try again"
            error = HttpError(429, text, "RateLimitError", headers=after)
        self._fail(error)

    def _fail(self, error: HttpError) -> None:
        self.abort()
        body = error_body(error, self.shape.error_style)
        if self._has_begun:
            head, done = (b"data: ", _DONE) if self.shape.has_done else (b"event: error\ndata: ", b"")
            self.outlet.body(head + body + b"\n\n" + done, is_last=True)
        else:
            self._send_whole(error.status, body, error.headers)

    def _send_whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        more = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.outlet.start(status, [*_JSON, (b"content-length", str(len(body)).encode()), *more])
        self.outlet.body(body, is_last=True)

    def _usage(self) -> TokenCounts:
        firsts = [choice for choice in self._choices if choice.asked.choice == 0]
        cached = sum(choice.num_cached_tokens for choice in firsts)
        size, prompts = self.emulator.block_size, [choice.asked.order.num_prompt_tokens for choice in firsts]
        num_output_tokens = sum(choice.asked.order.num_output_tokens for choice in self._choices)
        created = max(sum(prompt // size * size for prompt in prompts) - cached, 0)
        return TokenCounts(sum(prompts), num_output_tokens, cached, created)


class _Choice:
    """A `Listener` that passes on each token, or waits for its whole answer."""

    def __init__(self, reply: HttpReply, asked: AskedAnswer, index: int) -> None:
        self.reply, self.asked, self.num_cached_tokens = reply, asked, 0
        self._number: int | None = None
        self._is_over = False
        is_framed = reply.is_streamed and not reply.with_counts
        self._index, self._frame = index, reply.shape.frame(index) if is_framed else None
        self._pieces, self._last, self._send = asked.answer.pieces, len(asked.answer.pieces), reply.outlet.body
        self._num_sent = 0

    def submit(self, replica: int | None, arrived: float | None) -> None:
        """Send it to the emulator; both as of its `submit`."""
        number = self.reply.emulator.submit(self.asked.order, self, replica, arrived)
        if self._is_over:
            self.reply.emulator.abort(number)  # what was asked for beside it was lost meanwhile
            return
        self._number = number
        self.reply.counts.choices[number] = self

    def abort(self) -> None:
        """Its client has gone."""
        number = self._close()
        if number is not None:
            self.reply.emulator.abort(number)

    def on_tokens(self, num_tokens: int) -> None:
        if self.reply.is_over or not self.reply.is_streamed:
            return
        first, last, frame = self._num_sent, self._last, self._frame
        if num_tokens == 1 and 0 < first < last - 1 and frame is not None:
            self._num_sent = first + 1  # nearly all calls: what can be ready is
            self._send(frame[0] + encode_basestring_ascii(self._pieces[first]).encode() + frame[1])
            return
        self.reply.begin()
        self._num_sent = end = min(first + num_tokens, last)
        parts = [] if first else [self.reply.shape.opening(self._index)]
        for place in range(first, end):
            usage = TokenCounts(self.asked.order.num_prompt_tokens, place + 1) if self.reply.with_counts else None
            parts.append(self.reply.shape.token(self._index, place, usage))
        self.reply.outlet.body(b"".join(parts))

    def on_end(self, fate: Fate) -> None:
        self._close()
        if fate == "finished":
            self.reply.finish_one()
        else:
            self.reply.lose(fate)

    def _close(self) -> int | None:
        """Nothing more comes; the number that it had, if it was under way."""
        number, self._number, self._is_over = self._number, None, True
        if number is not None:
            self.reply.counts.choices.pop(number, None)
        return number
