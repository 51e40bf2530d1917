"""`PipelineTimer`: what plans take in each pipeline stage, as the simulator asks for it."""

__all__ = ["PipelineTimer", "StageTicks", "step_timer"]

from typing import NamedTuple

from perfmodel.cost.draws import Draw
from perfmodel.cost.estimate import host_fit
from perfmodel.cost.flow_line import StageTimes, plans_of_round, round_time
from perfmodel.cost.step_tables import PS_PER_S, StepTables
from perfmodel.cost.step_timer import StepTimer
from perfmodel.cost.usage import Usage
from perfmodel.ops.work import BatchShape

Prefills = tuple[tuple[int, int], ...]


class StageTicks(NamedTuple):
    """Picoseconds of one plan: of the host before it starts, and beside it, then of each stage in turn."""

    serial: int
    hidden: int
    stages: tuple[int, ...]


class PipelineTimer:
    """Durations in picoseconds of plans that pass several stages; `tables` are those of a graph with stages.

    draw: factors on what the calibration says, for ensembles
    """

    def __init__(self, tables: StepTables, draw: Draw | None = None) -> None:
        self.tables = tables
        self._draw = draw
        distinct = list(dict.fromkeys(tables.stages))
        self._timers = [StepTimer(stage, draw) for stage in distinct]
        self._order = [distinct.index(stage) for stage in tables.stages]
        self._host = host_fit(tables.graph, tables.timer)
        self._host_factor = draw.step if draw is not None else 1.0
        self._prompt_factor = draw.step * draw.prompt if draw is not None else 1.0

    @property
    def num_stages(self) -> int:
        return len(self._order)

    def fresh(self) -> "PipelineTimer":
        """A timer of the same steps that has counted nothing; without the draw."""
        return PipelineTimer(self.tables)

    def stage_times(
        self,
        num_tokens: int,
        num_samples: int,
        prefills: Prefills,
        num_decodes: int,
        decode_context: int,
        decode_windowed: tuple[int, ...] = (),
        group_tokens: int = 0,
    ) -> StageTicks:
        """Of one plan (the arguments are the fields of a BatchShape)."""
        times = [
            timer.step(num_tokens, num_samples, prefills, num_decodes, decode_context, decode_windowed, group_tokens)
            for timer in self._timers
        ]
        host, num_sequences = self._host, num_decodes + len(prefills)
        serial, hidden = (
            self._host_factor * host.serial_s(num_sequences),
            self._host_factor * host.hidden_s(num_sequences),
        )
        if prefills and num_tokens > host.captured_tokens:
            serial += self._prompt_factor * host.prompt_step_s
        return StageTicks(
            round(serial * PS_PER_S), round(hidden * PS_PER_S), tuple([times[index] for index in self._order])
        )

    def step(
        self,
        num_tokens: int,
        num_samples: int,
        prefills: Prefills,
        num_decodes: int,
        decode_context: int,
        decode_windowed: tuple[int, ...] = (),
        group_tokens: int = 0,
    ) -> int:
        """Of a step in steady state: the round of the plans that it is shared out to."""
        shape = BatchShape(
            num_tokens, num_samples, prefills, num_decodes, decode_context, decode_windowed, group_tokens
        )
        found: dict[StageTimes, int] = {}
        for plan, count in plans_of_round(shape, self.num_stages).items():
            times = self.stage_times(
                plan.num_tokens,
                plan.num_samples,
                plan.prefills,
                plan.num_decodes,
                plan.decode_context,
                plan.decode_windowed,
                plan.group_tokens,
            )
            found[StageTimes(*times)] = found.get(StageTimes(*times), 0) + count
        return round(round_time(found))

    def usage(self) -> Usage:
        """Totals over all plans so far, of a device on the average of the stages."""
        total = Usage()
        for index, timer in enumerate(self._timers):
            total.add(timer.usage(), self._order.count(index) / self.num_stages)
        return total


def step_timer(tables: StepTables, draw: Draw | None = None) -> StepTimer | PipelineTimer:
    """What times the steps of `tables`, in one stage or several."""
    return PipelineTimer(tables, draw) if tables.stages else StepTimer(tables, draw)
