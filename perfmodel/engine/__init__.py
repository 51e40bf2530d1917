"""One serving engine: which tokens of which requests run in the next step, and who owns the KV blocks.

Standard library only, no clock, no costs: `now` is an argument, and a driver (simulated or executed) turns the
`ServeLoop`.
"""

__all__ = [
    "DISCIPLINES",
    "POLICIES",
    "Backend",
    "BlockListener",
    "Discipline",
    "Estimates",
    "EstimatingScheduler",
    "Grant",
    "GroupedKVBlocks",
    "HostBlocks",
    "HostCopies",
    "KVBlockManager",
    "Outcome",
    "RadixKVBlocks",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "ServeLoop",
    "Slots",
    "Speculation",
    "StepPlan",
    "StepRecord",
    "scheduler_for",
]

from perfmodel.engine.admission import DISCIPLINES, POLICIES, Discipline
from perfmodel.engine.config import Estimates, SchedulerConfig, Slots, Speculation
from perfmodel.engine.estimating import EstimatingScheduler, scheduler_for
from perfmodel.engine.grouped_blocks import GroupedKVBlocks
from perfmodel.engine.host_blocks import HostBlocks, HostCopies
from perfmodel.engine.kv_blocks import BlockListener, KVBlockManager
from perfmodel.engine.plan import Backend, Grant, Outcome, StepPlan, StepRecord
from perfmodel.engine.radix_blocks import RadixKVBlocks
from perfmodel.engine.request import Request, RequestStatus
from perfmodel.engine.scheduler import Scheduler
from perfmodel.engine.serve_loop import ServeLoop
