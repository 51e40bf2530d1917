"""Closed-loop clients of a server with a delivery delay."""

import pytest

from perfmodel.engine import Request
from perfmodel.sim.clock import Alarm, TickEnvironment
from perfmodel.sim.traffic.clients import ClosedLoopClient, ConversationClient

STEP, DELIVERY = 10, 7


class AnsweringServer:
    """A request finishes after `STEP` ticks; its answer reaches the user `DELIVERY` ticks later."""

    def __init__(self, env: TickEnvironment) -> None:
        self._env = env
        self.client: ClosedLoopClient | ConversationClient
        self.sent: list[tuple[int, int]] = []

    def add(self, request: Request) -> None:
        assert request.arrival == self._env.ticks
        self.sent.append((request.request_id, request.arrival))
        Alarm(self._env, STEP, lambda _: self._finish(request), 0)

    def _finish(self, request: Request) -> None:
        request.finished_at = self._env.ticks + DELIVERY
        self.client.on_finished(request)


@pytest.mark.parametrize("think", [0, 5])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_closed_loop_user_sends_again_after_delivery_and_think_time(think: int, concurrency: int) -> None:
    env = TickEnvironment()
    server = AnsweringServer(env)
    requests = iter([Request(number, 0, 5, 5) for number in range(6)])
    server.client = ClosedLoopClient(env, requests, lambda _: server, concurrency, lambda _: think)
    env.run_until_idle()
    turn = STEP + DELIVERY + think
    assert server.sent == [(number, number // concurrency * turn) for number in range(6)]
    assert server.client.is_done


@pytest.mark.parametrize("think", [0, 5])
def test_turns_follow_after_their_pause_and_conversations_after_the_think_time(think: int) -> None:
    """Two conversations of two turns, 3 ticks apart, by one user."""
    env = TickEnvironment()
    server = AnsweringServer(env)
    talks = iter([[(0, Request(2 * i, 0, 5, 5), -1), (3, Request(2 * i + 1, 0, 9, 5), 0)] for i in range(2)])
    server.client = ConversationClient(env, talks, lambda _: server, 1, lambda _: think)
    env.run_until_idle()
    second = STEP + DELIVERY + 3
    third = second + STEP + DELIVERY + think
    assert server.sent == [(0, 0), (1, second), (2, third), (3, third + second)]
    assert server.client.is_done
