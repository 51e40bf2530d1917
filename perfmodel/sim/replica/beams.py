"""Beam search as vLLM's front end runs it: each token of each of W beams is a request of its own, for one token.

The first token of an answer is one request, every later one W, which begin when the last of those before has come:

    requests of an answer of L tokens = 1 + W (L - 1)

What a beam has so far, n = T + i tokens behind a prompt of T, is in the prefix cache but for its last block: the beam
that it goes on from has computed all full ones. So with blocks of b tokens

    computed of n = n - b floor((n - 1) / b)

Beams go on from each other by scores, which no traffic says: each has a parent that is drawn among all of them. Source:
vllm 0.30.0, entrypoints/generate/beam_search/online.py."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count

import numpy as np

from perfmodel.engine import Request
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.replica.replica import EngineRank

_FIRST_ID = 1 << 40  # of requests for tokens of beams, above all others


@dataclass(slots=True)
class _Search:
    """One answer. beams: the names of each one's full blocks; left: requests for the token under way"""

    asked: Request
    target: EngineRank
    rng: np.random.Generator
    beams: list[tuple[Hashable, ...]]
    left: int = 0
    num_tokens: int = 0


class BeamSearch:
    """Takes a request for an answer, as a server does, and asks `route` for its tokens.

    width: beams; block_size: of the prefix cache, in tokens; seed: of whom beams go on from"""

    def __init__(
        self, env: TickEnvironment, width: int, block_size: int, seed: int, route: Callable[[Request], EngineRank]
    ) -> None:
        self._env, self._width, self._block_size, self._seed, self._route = env, width, block_size, seed, route
        self._ids = count(_FIRST_ID)
        self._searches: dict[int, _Search] = {}  # by the numbers of requests under way
        self.num_answers = 0.0  # that have come, their parts among them

    def add(self, request: Request) -> None:
        """Begin the search for the answer to `request`."""
        rng = np.random.default_rng((self._seed, request.request_id))
        blocks = request.name_blocks(request.num_prompt_tokens // self._block_size)
        search = _Search(request, self._route(request), rng, [blocks])
        self._ask(search)

    def on_finished(self, token: Request) -> Request | None:
        """A `token` has come; the whole request, where it was its last."""
        search = self._searches.pop(token.request_id)
        asked, search.left = search.asked, search.left - 1
        asked.num_preemptions += token.num_preemptions
        if search.num_tokens == 0:
            asked.first_scheduled_at, asked.num_cached_tokens = token.first_scheduled_at, token.num_cached_tokens
        if search.left:
            return None
        search.num_tokens += 1
        self.num_answers += 1 / asked.max_output_tokens
        if search.num_tokens < asked.max_output_tokens:
            self._go_on(search)
            return None
        asked.num_output_tokens = self._width * asked.max_output_tokens
        asked.first_token_at = asked.finished_at = self._env.ticks + search.target.delay_out(self._width)
        return asked

    def _go_on(self, search: _Search) -> None:
        """Choose the beams of the next token, and ask for it."""
        parents = search.rng.integers(len(search.beams), size=self._width).tolist()
        length = search.asked.num_prompt_tokens + search.num_tokens
        name = "of beam", search.asked.request_id, length
        ends = [((*name, number),) if length % self._block_size == 0 else () for number in range(self._width)]
        search.beams = [(*search.beams[parent], *end) for parent, end in zip(parents, ends, strict=True)]
        self._ask(search)

    def _ask(self, search: _Search) -> None:
        asked, step = search.asked, search.num_tokens
        search.left = len(search.beams)
        for blocks in search.beams:
            length = asked.num_prompt_tokens + step
            token = Request(next(self._ids), self._env.ticks, length, 1, blocks, asked.priority)
            token.adapter, token.beam_step = asked.adapter, step
            self._searches[token.request_id] = search
            search.target.add(token)
