"""Metrics of the emulator itself: its clock, how late it is, what became of requests. Seconds here are those of the
wall, unless a name says otherwise."""

__all__ = ["LATE_BOUNDS", "own_families"]

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perfmodel.serve.emulator import Emulator
from perfmodel.serve.metrics.families import family, histogram_family
from perfmodel.serve.metrics.histogram import Histogram
from perfmodel.serve.metrics.page_text import LabelSet
from perfmodel.version import __version__

_NONE = LabelSet()
LATE_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)


def own_families(emulator: Emulator, lateness: Histogram, slowed_s: float, num_stalled: int) -> Iterator[Metric]:
    """All of them.

    emulator: whose they are
    lateness: of events of the clock, in seconds; slowed_s: seconds by which it was slowed
    num_stalled: clients that were cut off as they did not read
    """
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield family(gauge, "perfmodel_build_info", "The version of perfmodel.", [(_NONE.plus("version", __version__), 1)])
    text = "Simulated seconds per second that were asked for (--speed)."
    yield family(gauge, "perfmodel_speed_ratio", text, [(_NONE, emulator.clock.speed)])
    text = "Simulated seconds since the start."
    yield family(counter, "perfmodel_simulated_seconds", text, [(_NONE, emulator.clock.elapsed_s)])
    text = "Seconds by which the clock was slowed, as the machine could not keep up."
    yield family(counter, "perfmodel_clock_slowed_seconds", text, [(_NONE, slowed_s)])
    text = "Seconds by which ends of steps and other events came late."
    yield histogram_family("perfmodel_step_lateness_seconds", text, [(_NONE, lateness)])
    yield family(counter, "perfmodel_requests_sent", "Requests that clients sent.", [(_NONE, emulator.num_sent)])
    ended = {
        "finished": emulator.num_finished,
        "failed": emulator.num_failed,
        "timed_out": emulator.num_timed_out,
        "aborted": emulator.num_aborted,
    }
    samples = [(_NONE.plus("fate", fate), number) for fate, number in ended.items()]
    yield family(counter, "perfmodel_requests_ended", "Requests by what became of them.", samples)
    text = "Requests that clients wait for."
    yield family(gauge, "perfmodel_requests_under_way", text, [(_NONE, emulator.num_under_way)])
    text = "Connections that were cut off, as their clients read nothing of an answer for long."
    yield family(counter, "perfmodel_connections_stalled", text, [(_NONE, num_stalled)])
