"""Items worked on by a Ray cluster (extra `ray`): one task each, never retried by Ray itself.

Its nodes must have this perfmodel installed, the same sources and data (each task compares them, since others would
answer otherwise), and files that items name by path in the same place.
"""

__all__ = ["run_on_ray"]

import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from perfmodel.cores import collect_rarely
from perfmodel.errors import MissingExtraError, PerfmodelError
from perfmodel.planning.sweeps.store import installed_version

_PATIENCE_S = 10.0  # for a cluster to answer


def run_on_ray(
    function: Callable[[Any], Any],
    items: list[tuple[int, Any]],
    on_answer: Callable[[int, Any], list[tuple[int, Any]]],
    workers: int | None,
    address: str | None,
) -> list[tuple[int, str]]:
    """See `RunItems` of `perfmodel.planning.sweeps.workers`.

    Raises MissingExtraError without Ray, PerfmodelError where no cluster answers at `address` or its nodes have another
    perfmodel, and what the function raises.
    """
    if not items:
        return []
    with redirect_stdout(sys.stderr):  # where Ray reports problems of its nodes
        ray = _connected(address, workers)
        return _over(ray, function, items, on_answer, workers)


def _over(
    ray: Any,
    function: Callable[[Any], Any],
    items: list[tuple[int, Any]],
    on_answer: Callable[[int, Any], list[tuple[int, Any]]],
    workers: int | None,
) -> list[tuple[int, str]]:
    task = ray.remote(max_retries=0, num_cpus=1)(_attempt)
    version, todo = installed_version(), deque(items)
    # Twice as many as can run, so that none waits for this process; not all, which a scheduler would have to hold.
    most = 2 * (workers or max(int(ray.cluster_resources().get("CPU", 1)), 1))
    running: dict[Any, int] = {}
    lost: list[tuple[int, str]] = []
    try:
        while todo or running:
            while todo and len(running) < most:
                index, item = todo.popleft()
                running[task.remote(function, item, version)] = index
            for done in ray.wait(list(running))[0]:
                index = running.pop(done)
                try:
                    answer, error = ray.get(done)
                except ray.exceptions.RayTaskError as failure:  # the function's own errors are answers
                    reason = str(failure).strip().splitlines()[-1]
                    raise PerfmodelError(
                        f"--engine ray: a worker could not start ({reason}); its nodes need this perfmodel installed."
                    ) from None
                except ray.exceptions.RayError as failure:
                    lost.append((index, f"its Ray worker was lost ({type(failure).__name__})"))
                    continue
                if error is not None:
                    raise error
                todo.extendleft(on_answer(index, answer))
    finally:
        for left in running:
            ray.cancel(left, force=True)
    return lost


def _connected(address: str | None, workers: int | None) -> Any:
    """The module `ray`, connected: to what it is connected to, to `address`, or to a cluster of this machine's own."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else it prints some of its messages after the answer
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "--engine ray needs Ray, which is missing: pip install '.[ray]' in the checkout, or use --engine local."
        ) from None
    if ray.is_initialized():
        return ray
    try:
        _knock(address)
    except (OSError, ValueError) as error:
        raise PerfmodelError(
            f"--engine ray: no Ray cluster answers at {address} ({_first_line(error)}); start one with `ray start "
            f"--head`, or use --engine local."
        ) from None
    size = {"num_cpus": workers} if address is None and workers is not None else {}
    try:
        ray.init(address or "local", log_to_driver=False, include_dashboard=None, logging_level="ERROR", **size)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise PerfmodelError(f"--engine ray: {_trouble(address)} ({_first_line(error)}); {_way_in(address)}.") from None
    return ray


def _knock(address: str | None) -> None:
    """Raise OSError or ValueError where no server listens at `HOST:PORT`: Ray itself would wait for minutes."""
    if address is None or ":" not in address:  # this machine's own, or `auto`
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()


def _trouble(address: str | None) -> str:
    if address is None:
        return "Ray does not start on this machine"
    return "no usable Ray cluster here" if address == "auto" else f"the cluster at {address} refuses connections"


def _way_in(address: str | None) -> str:
    """What may be wrong where a server listens, but Ray cannot connect."""
    if address is None:
        return "use --engine local"
    if address == "auto":
        return "start one with `ray start --head`, or use --engine ray"
    if "RAY_AUTH_MODE" not in os.environ:  # a head started where there is a token asks for it, drivers do not send it
        return "if it asks for tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as it has them"
    return "it must have the same versions of Ray and Python, and, with RAY_AUTH_MODE=token, the same token"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _attempt(function: Callable[[Any], Any], item: Any, version: str) -> tuple[Any, Exception | None]:
    """(answer, None) or (None, error): an error is the caller's to raise as it is, not Ray's to wrap."""
    here = installed_version()
    if here != version:
        return None, PerfmodelError(
            f"--engine ray: node {socket.gethostname()} has another perfmodel ({here}) than this machine ({version}), "
            f"whose answers would differ; install the same on all."
        )
    collect_rarely()
    try:
        return function(item), None
    except Exception as error:
        return None, error
