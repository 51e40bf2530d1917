"""Clients send a workload's requests to a simulated cluster, with optional prompt compression.

    prompt = ceil(ratio x tokens)        TTFT += wait + t(tokens)        t: a prompt of all tokens on the compressor

The compressor has its own device, like one of the scenario's, and runs prompts in FIFO order. Shared prefixes stay
shared. Source: Jiang et al. 2023 (LLMLingua); Pan et al. 2024 (LLMLingua-2: one pass of a small encoder)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Protocol

from simpy.events import URGENT, Event

from perfmodel.cost import Calibration, EngineProfile, step_costs
from perfmodel.engine import Request
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.work import BatchShape
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.traffic.workload import ThinkTime, Turn, Workload, no_think_time
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario


class Server(Protocol):
    """Accepts requests: a replica, or a router in front."""

    def add(self, request: Request) -> None:
        """Accept `request` now."""


Route = Callable[[Request], Server]
Fits = tuple[Calibration, EngineProfile]


class OpenLoopClient:
    """Sends each request at its arrival time (open loop)."""

    def __init__(self, env: TickEnvironment, requests: Iterator[Request], route: Route) -> None:
        self._env, self._requests, self._route = env, requests, route
        self.is_done = False  # whether the last request is sent
        self._next: Request | None = None  # sent when the alarm goes off
        Alarm(env, 0, self._send, URGENT)

    def _send(self, _: Event) -> None:
        now, route = self._env.ticks, self._route
        request = self._next or next(self._requests, None)
        while request is not None and request.arrival <= now:
            route(request).add(request)
            request = next(self._requests, None)
        self._next = request
        if request is None:
            self.is_done = True
        else:
            Alarm(self._env, request.arrival - now, self._send, ARRIVAL_PRIORITY)

    def on_finished(self, request: Request) -> None:
        """No-op: arrivals do not wait for answers."""


class ConversationClient:
    """Sends the first turn of a conversation at its arrival, a later one a pause after the answer that it waits for; a
    lost turn ends its branch of the conversation.

    conversations: turns with the ticks before them and the place of the turn that they wait for, -1 for none: they come
                   after the conversation's beginning. So sessions of agents fork, and answers of a prompt come at once
    route:         where each goes
    concurrency:   closed loop of so many users, who begin another conversation a think time after their last
    think_time:    ticks that a user pauses after the answer to a request"""

    def __init__(
        self,
        env: TickEnvironment,
        conversations: Iterator[list[Turn]],
        route: Route,
        concurrency: int | None = None,
        think_time: ThinkTime = no_think_time,
    ) -> None:
        self._env, self._conversations, self._route = env, conversations, route
        self._is_closed, self._think_time = concurrency is not None, think_time
        self._later: dict[int, _Later] = {}  # what waits for the turn in flight, or about to be sent
        self._num_later = 0  # in all conversations that have begun
        self._has_more = True
        self._next: list[Turn] | None = None  # begins when the alarm goes off
        if concurrency is None:
            Alarm(env, 0, self._begin_due, URGENT)
        else:
            for _ in range(concurrency):
                Alarm(env, 0, lambda _: self._begin_now(), URGENT)

    @property
    def is_done(self) -> bool:
        return not self._has_more and not self._num_later

    def on_finished(self, request: Request) -> None:
        """Schedule the turns that wait for this answer; after a conversation's last one, the user's next."""
        later = self._later.pop(request.request_id)
        delay = max((request.finished_at or 0) - self._env.ticks, 0)  # the answer may be on its way
        if request.finished_at is None:
            self._drop(later)
        for pause, turn in later.turns:
            self._after(delay + pause, partial(self._send_later, turn))
        later.branches[0] += len(later.turns) - 1
        if self._is_closed and not later.branches[0]:
            self._after(delay + self._think_time(request.request_id), self._begin_now)

    def _drop(self, later: "_Later") -> None:
        """Turns that wait for an answer which does not come, and those that wait for theirs, are not sent."""
        waiting, later.turns = later.turns, []
        while waiting:
            _, turn = waiting.pop()
            self._num_later -= 1
            waiting += self._later.pop(turn.request_id).turns

    def _after(self, delay: int, send: Callable[[], None]) -> None:
        Alarm(self._env, delay, lambda _: send(), ARRIVAL_PRIORITY)

    def _begin_due(self, _: Event) -> None:
        now = self._env.ticks
        turns = self._next or next(self._conversations, None)
        while turns is not None and turns[0][1].arrival <= now:
            self._begin(turns)
            turns = next(self._conversations, None)
        self._next, self._has_more = turns, turns is not None
        if turns is not None:
            Alarm(self._env, turns[0][1].arrival - now, self._begin_due, ARRIVAL_PRIORITY)

    def _begin_now(self) -> None:
        turns = next(self._conversations, None)
        if turns is None:
            self._has_more = False
        else:
            self._begin(turns)

    def _begin(self, turns: list[Turn]) -> None:
        """Send the turns that wait for none; the branches of a conversation are those that are not yet answered."""
        branches = [0]
        self._num_later += len(turns)
        for _, turn, _ in turns:
            self._later[turn.request_id] = _Later(branches)
        for pause, turn, after in turns:
            if after >= 0:
                self._later[turns[after][1].request_id].turns.append((pause, turn))
                continue
            branches[0] += 1
            if pause:
                self._after(pause, partial(self._send_later, turn))
        for pause, turn, after in turns:
            if after < 0 and not pause:
                self._send_later(turn)

    def _send_later(self, request: Request) -> None:
        self._num_later -= 1
        request.arrival = self._env.ticks
        self._route(request).add(request)


@dataclass(slots=True)
class _Later:
    """Turns with the ticks before them. branches: of their conversation, shared by all of its turns"""

    branches: list[int]
    turns: list[tuple[int, Request]] = field(default_factory=list)


class ClosedLoopClient(ConversationClient):
    """`concurrency` users; each sends the next of `requests` to `route`, `samples` at once as answers of one prompt, a
    think time after the last of them.

    think_time: ticks that a user pauses after the answer to a request"""

    def __init__(
        self,
        env: TickEnvironment,
        requests: Iterator[Request],
        route: Route,
        concurrency: int,
        think_time: ThinkTime = no_think_time,
        samples: int = 1,
    ) -> None:
        groups = iter(lambda: [(0, request, -1) for request in islice(requests, samples)], [])
        super().__init__(env, groups, route, concurrency, think_time)

    def _after(self, delay: int, send: Callable[[], None]) -> None:
        """Without a delay the request is there before the next step is planned."""
        if delay:
            super()._after(delay, send)
        else:
            send()


def client_of(env: TickEnvironment, workload: Workload, route: Route) -> OpenLoopClient | ConversationClient:
    """Sends the requests of `workload` to where `route` says."""
    traffic, pause = workload.traffic, workload.think_time
    if traffic.has_conversations or traffic.rollouts is not None:
        return ConversationClient(env, workload.conversations(), route, workload.concurrency, pause)
    if workload.concurrency is None:
        return OpenLoopClient(env, workload.requests(), route)
    samples = traffic.samples_per_prompt
    return ClosedLoopClient(env, workload.requests(), route, workload.concurrency, pause, samples)


class Compressor:
    """Accepts requests like a server and forwards each once its prompt is compressed."""

    def __init__(self, env: TickEnvironment, seconds_of: Callable[[int], float], route: Route) -> None:
        self._env, self._seconds_of, self._route = env, seconds_of, route
        self._free_at = 0

    def add(self, request: Request) -> None:
        """Accept `request` with its full prompt."""
        tokens = request.num_source_tokens or request.num_prompt_tokens
        self._free_at = max(self._free_at, self._env.ticks) + to_ticks(self._seconds_of(tokens))
        delay = self._free_at - self._env.ticks
        Alarm(self._env, delay, lambda _: self._route(request).add(request), ARRIVAL_PRIORITY)

    @classmethod
    def of(cls, env: TickEnvironment, scenario: Scenario, model: ModelSpec, fits: Fits, route: Route) -> "Compressor":
        """Runs `model` as the engine of `scenario` would, on one device, prompts only.

        env: the clock; fits: calibration and profile of the device; route: where compressed requests go"""
        engine = EngineSpec(profile=scenario.engine.profile, enforce_eager=scenario.engine.enforce_eager)
        costs = step_costs(scenario.model_copy(update={"model": model, "engine": engine}), *fits)

        @cache
        def seconds_of(tokens: int) -> float:
            return costs.estimate(BatchShape(tokens, 1, ((tokens, 0),))).duration_s

        return cls(env, seconds_of, route)
