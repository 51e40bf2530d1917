"""An asyncio event loop in which sleeping costs nothing: `run` a coroutine in it.

Its clock stands still while something runs, and jumps to the next timer when nothing does, so what happens there does
not depend on the machine. Only what stays within the process is at home in it: nobody waits for a socket.
"""

import asyncio
import selectors


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at second 0."""

    def __init__(self):
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self):
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and no timer is set"
            self._loop.now += max(timeout, 0)
        return ready


def run(coroutine):
    """What `coroutine` returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
