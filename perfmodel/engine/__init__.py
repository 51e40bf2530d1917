"""One serving engine: its scheduler and KV blocks.

Standard library only; knows no clock and no costs. `now` is an argument; a driver of either clock runs `ServeLoop`."""

__all__ = [
    "DISCIPLINES",
    "POLICIES",
    "AdapterLimits",
    "Backend",
    "BlockListener",
    "Discipline",
    "EncoderInput",
    "EncoderRules",
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
from perfmodel.engine.config import AdapterLimits, EncoderRules, Estimates, SchedulerConfig, Slots, Speculation
from perfmodel.engine.estimating import EstimatingScheduler, scheduler_for
from perfmodel.engine.grouped_blocks import GroupedKVBlocks
from perfmodel.engine.host_blocks import HostBlocks, HostCopies
from perfmodel.engine.kv_blocks import BlockListener, KVBlockManager
from perfmodel.engine.plan import Backend, Grant, Outcome, StepPlan, StepRecord
from perfmodel.engine.radix_blocks import RadixKVBlocks
from perfmodel.engine.request import EncoderInput, Request, RequestStatus
from perfmodel.engine.scheduler import Scheduler
from perfmodel.engine.serve_loop import ServeLoop
