"""Items worked on by a Ray cluster (extra `ray`): one task each, never retried by Ray itself.

A cluster must have perfmodel installed on its nodes, and files that items name by path in the same place.
"""

__all__ = ["run_on_ray"]

import socket
from collections.abc import Callable
from itertools import islice
from typing import Any

from perfmodel.errors import MissingExtraError, PerfmodelError

_PATIENCE_S = 10.0  # for a cluster to answer


def run_on_ray(
    function: Callable[[Any], Any],
    items: list[tuple[int, Any]],
    on_answer: Callable[[int, Any], None],
    workers: int | None,
    address: str | None,
) -> list[tuple[int, str]]:
    """See `perfmodel.plan.workers`: (index, reason) of the items whose worker was lost.

    Raises MissingExtraError without Ray, PerfmodelError where no cluster answers at `address`, and what the function
    raises.
    """
    ray = _connected(address, workers)
    task = ray.remote(max_retries=0, num_cpus=1)(_attempt)
    todo = iter(items)
    room = workers or int(ray.cluster_resources().get("CPU", 1))
    # Twice as many as can run, so that none waits for this process; not all, which a scheduler would have to hold.
    running = {task.remote(function, item): index for index, item in islice(todo, 2 * room)}
    lost: list[tuple[int, str]] = []
    try:
        while running:
            for done in ray.wait(list(running))[0]:
                index = running.pop(done)
                running |= {task.remote(function, item): number for number, item in islice(todo, 1)}
                try:
                    answer, error = ray.get(done)
                except ray.exceptions.RayTaskError as failure:  # the function's own errors are answers
                    reason = str(failure).strip().splitlines()[-1]
                    raise PerfmodelError(
                        f"--engine ray: a worker could not begin ({reason}); its nodes need perfmodel installed."
                    ) from None
                except ray.exceptions.RayError as failure:
                    lost.append((index, f"its Ray worker was lost ({type(failure).__name__})"))
                    continue
                if error is not None:
                    raise error
                on_answer(index, answer)
    finally:
        for left in running:
            ray.cancel(left, force=True)
    return lost


def _connected(address: str | None, workers: int | None) -> Any:
    """The module `ray`, connected: to what it is connected to, to `address`, or to a cluster of this machine's own."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "--engine ray needs Ray, which is not installed: pip install 'perfmodel[ray]', or use --engine local."
        ) from None
    if not ray.is_initialized():
        size = {"num_cpus": workers} if address is None and workers is not None else {}
        try:
            _knock(address)
            ray.init(address or "local", log_to_driver=False, include_dashboard=None, logging_level="ERROR", **size)
        except (OSError, ValueError, RuntimeError) as error:
            where = f"at {address}" if address else "on this machine"
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise PerfmodelError(
                f"--engine ray: no Ray cluster answers {where} ({reason}); start one with `ray start --head`, or use "
                f"--engine local."
            ) from None
    return ray


def _knock(address: str | None) -> None:
    """Raise OSError or ValueError where nobody listens at `HOST:PORT`: Ray itself would wait for minutes."""
    if address is None or ":" not in address:  # this machine's own, or `auto`
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()


def _attempt(function: Callable[[Any], Any], item: Any) -> tuple[Any, Exception | None]:
    """(answer, None) or (None, error): an error is the caller's to raise as it is, not Ray's to wrap."""
    try:
        return function(item), None
    except Exception as error:
        return None, error
