"""Time that passes when somebody sleeps, for what asks `time` in an engine's environment."""

__all__ = ["VirtualTime"]


class VirtualTime:
    """`monotonic` and `sleep` of `time`, beginning at 0 s."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        """Lets them pass."""
        self.now_s += duration_s
