"""`Ring`: where a rolling cache keeps the token at a position, and which tokens it still has."""

__all__ = ["Ring"]

from typing import NamedTuple


class Ring(NamedTuple):
    """The first `sinks` tokens stay where they are; the others share `window` places in turn."""

    window: int
    sinks: int = 0

    @property
    def size(self) -> int:
        """Tokens that it holds at most."""
        return self.window + self.sinks

    def place(self, position: int) -> int:
        """The place of the token at `position`, in 0 .. size - 1."""
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.window

    def holds(self, position: int, num_tokens: int) -> bool:
        """Whether the token at `position` is still there once a sequence has `num_tokens`."""
        return position < self.sinks or position >= num_tokens - self.window
