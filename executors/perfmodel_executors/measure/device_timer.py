"""How long one call takes on the device, without the host: replayed from a CUDA graph, over inputs that no cache holds.
A graph holds many calls on copies of the inputs, together larger than three times the L2; a sample is a replay over its
calls. What cannot be captured is timed with events around a loop; on a CPU a sample is one call's thread CPU time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from perfmodel_executors.measure.protocol import quantile, taken_ns, uninterrupted

_REPLAYS = 9
_REPLAY_S = 3e-3  # of device time in one graph: far above the resolution of events
_MAX_CALLS = 400
_CPU_SAMPLES = 5
_L2_FACTOR = 3
_MIN_COPIES, _MAX_COPIES = 3, 48  # a call may touch only a part of its inputs (experts)
_COPY_BUDGET_BYTES = 6e9

Call = Callable[[], object]


class Timing(NamedTuple):
    """Seconds of a call: median, and the spread of the samples. is_eager: the host launched the calls one after the
    other, so that what it takes shows; on a GPU they are else replayed from a graph."""

    seconds: float
    p10_s: float
    p90_s: float
    is_eager: bool = False


def num_copies(num_bytes: float, device: torch.device) -> int:
    """How many copies of inputs of `num_bytes` it takes for none to be in the L2 when its turn comes again."""
    if device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = 1 + int(_L2_FACTOR * l2_bytes / max(num_bytes, 1.0))
    most = int(_COPY_BUDGET_BYTES / max(num_bytes, 1.0))
    return max(1, min(max(wanted, _MIN_COPIES), _MAX_COPIES, most))


def time_calls(calls: Sequence[Call], device: torch.device) -> Timing:
    """`calls` do the same work on different copies of the inputs; they have run before (compiled, tuned)."""
    is_eager = False
    if device.type == "cuda":
        rough = _elapsed_s(lambda: _run_all(calls, len(calls))) / len(calls)
        count = max(len(calls), min(_MAX_CALLS, int(_REPLAY_S / max(rough, 1e-7))))
        graph = _captured(calls, count)
        replay, is_eager = graph or (lambda: _run_all(calls, count)), graph is None
        replay()
        samples = [_elapsed_s(replay) / count for _ in range(_REPLAYS)]
    else:
        with uninterrupted():
            samples = [max(1, taken_ns(calls[index % len(calls)])) * 1e-9 for index in range(_CPU_SAMPLES)]
    return Timing(quantile(samples, 0.5), quantile(samples, 0.1), quantile(samples, 0.9), is_eager)


def _run_all(calls: Sequence[Call], count: int) -> None:
    for index in range(count):
        calls[index % len(calls)]()


def _captured(calls: Sequence[Call], count: int) -> Call | None:
    """A replay of `count` calls; None where the calls cannot be captured. Those that wait for the device are found
    before: a failed capture leaves the random numbers of the device unusable."""
    if _waits(calls[0]):
        return None
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            _run_all(calls, len(calls))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run_all(calls, count)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    replay: Callable[[], Any] = graph.replay
    return replay


def _waits(call: Call) -> bool:
    """Whether the host waits for the device within the call (a size read back, a list sent from pageable memory)."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _elapsed_s(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
