"""Scheduling policies: one function each, from a request to its sort key; the smallest key is served first.

The same key chooses the victim of a preemption: the running request with the largest one. To add a policy, write
the function and enter it in POLICIES (and its name in `EngineSpec.scheduling_policy`).
"""

__all__ = ["POLICIES", "Policy", "fcfs", "priority", "shortest_first", "urgency"]

from collections.abc import Callable

from perfmodel.engine.request import Request

Policy = Callable[[Request], tuple[int, ...]]


def fcfs(request: Request) -> tuple[int, ...]:
    """First come, first served."""
    return (request.arrival, request.request_id)


def priority(request: Request) -> tuple[int, ...]:
    """Lowest `priority` number first, then first come."""
    return (request.priority, request.arrival, request.request_id)


def shortest_first(request: Request) -> tuple[int, ...]:
    """Shortest prompt first: the part of the service time that is known on arrival."""
    return (request.num_prompt_tokens, request.arrival, request.request_id)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "shortest-first": shortest_first}


def urgency(policy: str) -> Callable[[Request], int]:
    """Rank of requests whose KV was computed elsewhere, before their order of arrival; the least goes first."""
    return (lambda request: request.priority) if policy == "priority" else (lambda _: 0)
