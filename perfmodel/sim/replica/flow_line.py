"""`FlowLine`: when a plan is through all pipeline stages, on either clock.

A plan begins stage s once it is through the stage before, and the plan in front of it is through s:

    begin_s(n) = max( end_{s-1}(n), end_s(n-1) )

The host is the first server of this flow line: what it does before a plan starts takes its time once a plan, what it
does beside the devices keeps it from the next one, and the plan from its end (`perfmodel.cost.steps.stages`).
"""

from perfmodel.cost import StageTicks


class FlowLine:
    """Stages that plans pass in the order in which they are made."""

    def __init__(self, num_stages: int) -> None:
        self._ends = [0] * num_stages  # when each stage is through with all that was given to it
        self._host_end = 0

    @property
    def num_stages(self) -> int:
        return len(self._ends)

    def end_of(self, times: StageTicks, now: int) -> int:
        """Send a plan that takes `times` on its way: when it is back, in ticks."""
        start = max(now, self._host_end)
        end, ends = start + times.serial, self._ends
        self._host_end = end + times.hidden
        for stage, duration in enumerate(times.stages):
            free = ends[stage]
            end = ends[stage] = (free if free > end else end) + duration
        return max(end, self._host_end)
