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
    "Grant",
    "GroupedKVBlocks",
    "HostBlocks",
    "HostCopies",
    "KVBlockManager",
    "Outcome",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "ServeLoop",
    "Slots",
    "Speculation",
    "StepPlan",
    "StepRecord",
]

from perfmodel.engine.admission import DISCIPLINES, POLICIES, Discipline
from perfmodel.engine.config import SchedulerConfig, Slots, Speculation
from perfmodel.engine.grouped_blocks import GroupedKVBlocks
from perfmodel.engine.host_blocks import HostBlocks
from perfmodel.engine.host_copies import HostCopies
from perfmodel.engine.kv_blocks import BlockListener, KVBlockManager
from perfmodel.engine.plan import Backend, Grant, Outcome, StepPlan, StepRecord
from perfmodel.engine.request import Request, RequestStatus
from perfmodel.engine.scheduler import Scheduler
from perfmodel.engine.serve_loop import ServeLoop
