"""The simulated clock: traffic, replicas behind a router, and a driver that advances time by the cost model.

SimPy is imported only here. The executed clock shares the engine, workloads, records and their summary."""

__all__ = [
    "Collector",
    "DeviceTotals",
    "RequestColumns",
    "RunResult",
    "StepColumns",
    "Workload",
    "build_serve_loop",
    "simulate",
    "summarize",
]

from perfmodel.sim.driver import simulate
from perfmodel.sim.records.collector import Collector
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.result import RunResult
from perfmodel.sim.records.summary import DeviceTotals, summarize
from perfmodel.sim.replica.serving import build_serve_loop
from perfmodel.sim.traffic.workload import Workload
