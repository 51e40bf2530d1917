"""`FrontEnd`: the server before and after one engine: HTTP, tokenisation, streaming. Time that no step knows of."""

__all__ = ["FrontEnd"]

from perfmodel.cost.calibrations.engine_profile import ServerFit
from perfmodel.engine import Request
from perfmodel.sim.clock import to_ticks


class FrontEnd:
    """Delays requests on their way in, and knows when their tokens reach the client."""

    def __init__(self, server: ServerFit) -> None:
        self._in = to_ticks(server.in_s)
        self._in_per_token = to_ticks(server.in_per_prompt_token_s)
        self._out = to_ticks(server.out_s)
        self._out_per_sequence = to_ticks(server.out_per_sequence_s)
        self._tokenizer_free_at = 0

    def delay(self, request: Request, now: int) -> int:
        """Ticks until a request that arrives now is with the engine; one is tokenised after the other."""
        self._tokenizer_free_at = max(self._tokenizer_free_at, now) + self._in_per_token * request.num_prompt_tokens
        return self._tokenizer_free_at - now + self._in

    def deliver(self, request: Request) -> None:
        """Move a finished request's times from when its tokens were sampled to when the client had them."""
        assert request.first_token_at is not None
        assert request.finished_at is not None
        request.first_token_at += self._out + self._out_per_sequence * request.first_token_batch
        request.finished_at += self._out + self._out_per_sequence * request.last_token_batch
