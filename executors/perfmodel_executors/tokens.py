"""Token ids of requests: the engine knows counts and block hashes only, the executor needs values. A prompt's ids
follow from its block hashes, so that a cached block holds what its finder would compute; else from the request's id."""

from collections.abc import Hashable, Sequence
from hashlib import blake2b

import numpy as np

from perfmodel.engine import Request
from perfmodel.sim.traffic.distributions import hashes


class TokenStore:
    """Prompt and output token ids per request. text: ids of a text to cut prompts from; else they are random; around:
    ids before and after what a request says, for prompts that have room for them; has_answers: later turns of a
    conversation repeat its answers, else what a prompt repeats is in its hashes"""

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        seed: int = 0,
        text: Sequence[int] = (),
        around: tuple[Sequence[int], Sequence[int]] = ((), ()),
        has_answers: bool = True,
    ) -> None:
        self._vocab_size, self._block_size, self._seed = vocab_size, block_size, seed
        self._text, self._around, self._has_answers = text, around, has_answers
        self._tokens: dict[int, list[int]] = {}
        self._said: dict[Hashable, list[int]] = {}  # in each conversation, up to its last answer

    def of(self, request: Request) -> list[int]:
        """All ids known so far, the prompt's first; the caller must not change it."""
        if request.request_id not in self._tokens:
            self._tokens[request.request_id] = self._prompt(request)
        return self._tokens[request.request_id]

    def give(self, request: Request, prompt: Sequence[int]) -> None:
        """`prompt` is what the request asks, in place of drawn ids."""
        assert len(prompt) == request.num_prompt_tokens, f"{request} has {len(prompt)} tokens"
        self._tokens[request.request_id] = list(prompt)

    def put(self, request: Request, position: int, token: int) -> None:
        """`token` was sampled for `position`; a known one does not change, and none goes beyond the answer's end."""
        if position >= request.num_prompt_tokens + request.max_output_tokens:
            return
        tokens = self.of(request)
        if position == len(tokens):
            tokens.append(token)
        elif position > len(tokens):
            raise AssertionError(f"{request} sampled position {position} but has {len(tokens)} tokens")

    def outputs(self, request: Request) -> list[int]:
        return self.of(request)[request.num_prompt_tokens :]

    def finish(self, request: Request) -> None:
        """`request` is answered: of a conversation's turn the text stays until the next one asks."""
        if request.turn >= 0 and self._has_answers:
            self._said[request.session] = list(self.of(request))

    def release(self, request: Request) -> None:
        """Forget a finished request, of which no step computes tokens any more."""
        self._tokens.pop(request.request_id, None)

    def _prompt(self, request: Request) -> list[int]:
        size, length = self._block_size, request.num_prompt_tokens
        if request.turn > 0 and self._has_answers:
            prompt = self._said.pop(request.session)
            return prompt + self._draw(f"request {request.request_id} from {len(prompt)}", length - len(prompt))
        before, after = self._around
        if not request.block_hashes and length > len(before) + len(after):
            count = length - len(before) - len(after)
            return [*before, *self._draw(f"request {request.request_id} from 0", count), *after]
        ids: list[int] = []
        for content in request.block_hashes[: length // size]:
            ids += self._draw(f"block {content!r}", size)
        return ids + self._draw(f"request {request.request_id} from {len(ids)}", length - len(ids))

    def _draw(self, name: str, count: int) -> list[int]:
        key = blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        start = int(np.frombuffer(key, dtype=np.uint64)[0])
        if self._text:
            first = start % max(1, len(self._text) - count)
            return [self._text[(first + i) % len(self._text)] for i in range(count)]
        return list((hashes(start, count) % np.uint64(self._vocab_size)).tolist())
