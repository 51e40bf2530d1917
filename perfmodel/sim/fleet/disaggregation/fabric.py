"""`Fabric`: what all links lead into. Transfers share its bandwidth evenly, but none goes faster than its own links.

Max-min fairness, as a switch with fair queues, or long TCP flows over one bottleneck, come to: with the bandwidth W and
n transfers of caps c_i each moves at min(c_i, w), w being such that the rates add up to W, or all are at their caps.
"""

__all__ = ["Fabric"]

from math import ceil

from simpy.events import Event

from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment


class _Flow:
    __slots__ = ("cap", "done", "left", "rate")

    def __init__(self, left: float, cap: float, done: Event) -> None:
        self.left, self.cap, self.done, self.rate = left, cap, done, 0.0


class Fabric:
    """Moves bytes, all transfers together at most `bandwidth_bytes_per_s`."""

    def __init__(self, env: TickEnvironment, bandwidth_bytes_per_s: float) -> None:
        self._env, self._bandwidth = env, bandwidth_bytes_per_s
        self._flows: list[_Flow] = []
        self._as_of = 0
        self._alarm: Alarm | None = None

    def move(self, num_bytes: float, cap_bytes_per_s: float) -> Event:
        """An event that happens when `num_bytes`, which come at `cap_bytes_per_s` at most, have passed."""
        self._pass()
        flow = _Flow(num_bytes, cap_bytes_per_s, Event(self._env))
        self._flows.append(flow)
        self._share()
        return flow.done

    def stop(self, done: Event) -> None:
        """What was to move until `done` moves no further; the others share what it had."""
        self._pass()
        self._flows = [flow for flow in self._flows if flow.done is not done]
        self._share()

    def _pass(self) -> None:
        """What has moved since the rates were set."""
        seconds = (self._env.ticks - self._as_of) / TICKS_PER_S
        self._as_of = self._env.ticks
        for flow in self._flows:
            flow.left -= flow.rate * seconds

    def _share(self) -> None:
        """Set the rates, slowest links first, and the alarm for whoever is through first."""
        left = self._bandwidth
        for number, flow in enumerate(sorted(self._flows, key=lambda flow: flow.cap)):
            flow.rate = min(flow.cap, left / (len(self._flows) - number))
            left -= flow.rate
        self._alarm = None
        if self._flows:
            seconds = min(max(flow.left, 0.0) / flow.rate for flow in self._flows)
            self._alarm = Alarm(self._env, ceil(seconds * TICKS_PER_S), self._look, ARRIVAL_PRIORITY)

    def _look(self, alarm: Event) -> None:
        if alarm is not self._alarm:
            return
        self._pass()
        through = [flow for flow in self._flows if flow.left <= flow.rate / TICKS_PER_S]  # less than a tick is left
        self._flows = [flow for flow in self._flows if flow.left > flow.rate / TICKS_PER_S]
        for flow in through:
            flow.done.succeed()
        self._share()
