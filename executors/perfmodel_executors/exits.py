"""`DrawnExits`: how many layers each decoded token passes, drawn at the rates that the scenario gives."""

__all__ = ["DrawnExits"]

from perfmodel.engine import Request
from perfmodel.models.spec import ExitSpec
from perfmodel.sim.traffic.hashed import uniform_draws


class DrawnExits:
    """Draws from `seed`: a token's is a hash of request and position, whoever runs beside it."""

    def __init__(self, exits: ExitSpec, seed: int) -> None:
        self._reach = exits.reach
        self._seed = seed
        self._draws: dict[int, list[float]] = {}
        self.num_tokens = self.num_layers = 0

    def pass_layers(self, request: Request, position: int) -> int:
        """Layers for the token at `position`, whose next one is an output token."""
        draws = self._draws.get(request.request_id)
        if draws is None:
            draws = list(map(float, uniform_draws(self._seed, request.request_id, request.max_output_tokens)))
            self._draws[request.request_id] = draws
        draw = draws[position + 1 - request.num_prompt_tokens]
        count = sum(draw < share for share in self._reach)
        self.num_tokens += 1
        self.num_layers += count
        return count

    def release(self, request: Request) -> None:
        """Forget a finished request."""
        self._draws.pop(request.request_id, None)

    def in_words(self) -> str:
        """What came of it."""
        total = self.num_tokens * len(self._reach)
        return f"Decoded tokens passed {self.num_layers / max(total, 1):.0%} of the layers."
