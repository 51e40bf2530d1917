"""Which resource counts, where bounds change, where an alternative pays: `perfmodel whatif`."""

__all__ = ["answer_whatif", "split_overrides"]

import shlex
from collections.abc import Sequence
from dataclasses import replace

from perfmodel.answers.answer import Answer, Watch, unwatched
from perfmodel.answers.asked import Asked
from perfmodel.errors import SpecError


def answer_whatif(
    asked: Asked,
    vary: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    grid: bool = False,
    against: str | None = None,
    overrides: Sequence[str] | None = None,
    workers: int | None = None,
    engine: str = "local",
    progress: Watch = unwatched,
    command: str = "",
    intervals: bool = False,
) -> Answer:
    """A scenario varied one value at a time; `result` is the WhatIfResult.

    asked:     the scenario
    vary:      `PATH=LO..HI[:N]` or `PATH=A,B,C`; by default the resources that could be bought, and the load
    metrics:   of runs, steps and memory; by default latencies and throughput
    grid:      two varied values in all their combinations
    against:   overrides of an alternative in one text, `a=1 b=2`: where along each axis does it begin to pay?
    overrides: as `--set` takes them
    workers, engine: as of `perfmodel.planning.sweep`
    progress:  a stage's name -> what shows how far it is
    command:   that the document says to give the answer again
    intervals: also the 80 % intervals of means, for which each point is simulated several times

    Raises SpecError for what cannot be read.
    """
    from perfmodel.planning.whatif import ask_whatif
    from perfmodel.report.views.whatif import whatif_brief, whatif_json, whatif_view

    result = ask_whatif(
        asked.source(),
        vary or (),
        overrides or (),
        metrics or (),
        grid,
        split_overrides(against),
        workers,
        engine,
        progress,
        intervals,
    )
    result = replace(result, assumed=asked.assumed(result.answers.scenario, overrides))
    return Answer(
        lambda: whatif_json(result), lambda: whatif_view(result, command), result, lambda: whatif_brief(result)
    )


def split_overrides(against: str | None) -> list[str]:
    """The overrides of an alternative. Raises SpecError for a quote without its end."""
    try:
        return shlex.split(against or "")
    except ValueError as error:
        raise SpecError(f"--against {against}: {error}; quote it as in --against 'a=1 b=2'.") from None
