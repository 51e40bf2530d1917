"""The simulated clock: arrivals, replicas behind a router, and the driver that lets the cost model's time pass.

SimPy is used only here. What both clocks share beside the engine also does: workloads, records and their summary.
"""

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
