"""`RequestDraft`: a request as the traffic gives it, before the engine knows it."""

__all__ = ["RequestDraft"]

from collections.abc import Hashable
from math import ceil
from typing import NamedTuple


class RequestDraft(NamedTuple):
    """A request before it arrives; `arrival_s` is None in a closed loop, where the system's answers set the time.

    num_source_tokens: of a prompt that was shortened, before that; 0 for one that was not
    """

    arrival_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    priority: int = 0
    num_source_tokens: int = 0
    session: Hashable | None = None

    def compressed(self, ratio: float) -> "RequestDraft":
        """The request with the share `ratio` of its prompt, of which it remembers the length."""
        tokens = self.num_prompt_tokens
        hashes = self.block_hashes[: int(len(self.block_hashes) * ratio)]
        return self._replace(num_prompt_tokens=ceil(ratio * tokens), block_hashes=hashes, num_source_tokens=tokens)
