"""`token_watch`: who watches the tokens of an engine, where a limit asks for the times of single tokens."""

__all__ = ["token_watch"]

from perfmodel.engine import Request
from perfmodel.engine.token_watch import TokenWatch
from perfmodel.sim.clock import to_ticks
from perfmodel.sim.traffic.shares import class_shares
from perfmodel.specs.scenario import Scenario


def token_watch(scenario: Scenario) -> TokenWatch | None:
    """A watch with the readers of the scenario's SLO, and of those of its classes; None if no limit needs it."""
    if not scenario.needs_token_times:
        return None
    limits = [kind.slo or scenario.slo for kind in scenario.traffic.classes] or [scenario.slo]
    paces = [None if slo.reading_speed is None else to_ticks(1 / slo.reading_speed) for slo in limits]
    if len(set(paces)) == 1:
        return TokenWatch(lambda _: paces[0])
    shares = class_shares(scenario)

    def pace_of(request: Request) -> int | None:
        return paces[shares.of(request.request_id)]

    return TokenWatch(pace_of)
