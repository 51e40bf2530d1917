"""A run by the groups that its requests belong to: priority classes."""

__all__ = ["class_summaries"]

from typing import Any

import numpy as np

from perfmodel.sim.records.collector import Collector
from perfmodel.sim.records.latencies import attained, latencies, missed, num_good, ratio, token_latencies
from perfmodel.sim.traffic.hashed import class_shares
from perfmodel.specs.scenario import Scenario


def class_summaries(scenario: Scenario, collector: Collector) -> list[dict[str, Any]]:
    """What became of the requests of each class; latencies of those that were completed."""
    shares, requests = class_shares(scenario), collector.requests()
    done = shares.of_all(requests.request_id)
    lost = [(shares.of(number), fate) for number, fate in collector.lost]
    duration = collector.end_tick / 1e12
    rows = []
    for number, kind in enumerate(scenario.traffic.classes):
        mine = requests.some(np.flatnonzero(done == number))
        misses = missed(kind.slo or scenario.slo, mine)
        good = num_good(misses)
        fates = [fate for of, fate in lost if of == number]
        rows.append(
            {
                "name": kind.name,
                "priority": kind.priority,
                "completed": len(mine),
                "failed": fates.count("failed"),
                "timed_out": fates.count("timed_out"),
                "request_throughput": ratio(len(mine), duration),
                "request_goodput": None if good is None else ratio(good, duration),
                **attained(misses, len(fates)),
                **latencies("ttft", mine.ttft_s),
                **latencies("tpot", mine.tpot_s),
                **latencies("e2el", mine.e2el_s),
                **token_latencies(mine),
            }
        )
    return rows
