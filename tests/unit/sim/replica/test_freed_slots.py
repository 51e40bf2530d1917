"""Rule R4: under asynchronous scheduling a freed slot waits one whole step; else it is filled in the next."""

import pytest

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop


@pytest.mark.parametrize(("is_async", "steps_empty"), [(True, 1), (False, 0)])
def test_how_long_a_freed_slot_waits(is_async: bool, steps_empty: int) -> None:
    """One slot, two requests of 8 prompt and 3 output tokens: the first runs in steps 0 to 2.

    A third request on a second slot keeps the engine busy, so that steps are counted.
    """
    loop = ServeLoop(Scheduler(SchedulerConfig(max_num_seqs=2), KVBlockManager(1000, 16)), is_async)
    for request in (Request(0, 0, 8, 50), Request(1, 0, 8, 3), Request(2, 0, 8, 3)):
        loop.add(request)
    ended = started = -1
    for step in range(20):
        plan = loop.start_step(step)
        assert plan is not None
        if any(grant.request.request_id == 2 for grant in plan.chunks):
            started = step
        finished, _ = loop.finish_step(plan, step, step + 1)
        if any(request.request_id == 1 for request in finished):
            ended = step
    assert ended == 2
    assert started - ended - 1 == steps_empty
