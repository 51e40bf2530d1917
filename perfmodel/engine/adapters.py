"""LoRA adapters: which a step may have, and which it has to load first (vLLM v1).

A waiting request whose adapter would be one more than the step has slots for is skipped and keeps its place; those
behind it go on (`Scheduler._admit`). Before a step the worker takes each of its adapters to a slot: from the host's
memory, or from the disk by way of that. Both evict the least recently used one, and what leaves the host's memory
leaves its slot. A server loads the adapters that it is started with in their order, so that the last ones are there.

Source: vllm/v1/core/sched/scheduler.py (`scheduled_loras`), vllm/lora/worker_manager.py (`LRUCacheWorkerLoRAManager`),
vllm/lora/model_manager.py (`LRUCacheLoRAModelManager`), vLLM 0.30."""

from collections import OrderedDict
from collections.abc import Iterable

from perfmodel.engine.config import AdapterLimits
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request


class AdapterSlots:
    """Slots and the host's memory under `limits`; num_loads: so far, num_from_disk of them from the disk."""

    def __init__(self, limits: AdapterLimits) -> None:
        self._limits = limits
        self._slots: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._in_host: OrderedDict[int, None] = OrderedDict()
        self._last: tuple[list[Request], int, int] | None = None  # decodes of a plan without chunks, and its counts
        self.num_loads = self.num_from_disk = 0
        self.start()

    def start(self) -> None:
        """As a server begins: with what it loads first, and nothing that it had before."""
        self._slots.clear()
        self._in_host.clear()
        self._last = None
        for adapter in range(self._limits.num_adapters):
            self._take(adapter)

    def scheduled(self, plan: StepPlan, members: Iterable[Request]) -> set[int]:
        """Adapters of the running requests that `plan` grants tokens so far; `members`: of its cohort."""
        granted = [*(members if plan.cohort_age else ()), *plan.decodes, *plan.singles]
        granted += [grant.request for grant in plan.chunks]
        return {request.adapter for request in granted if request.adapter is not None}

    def admits(self, request: Request, scheduled: set[int]) -> bool:
        """Whether a step that has the adapters `scheduled` may have that of `request`, too."""
        return request.adapter is None or request.adapter in scheduled or len(scheduled) < self._limits.max_loras

    def load(self, plan: StepPlan) -> None:
        """Take the adapters of `plan` to slots; enter what it has and loads."""
        last, decodes = self._last, plan.decodes
        if last is not None and last[0] is decodes and not plan.chunks:  # the same as in the plan before
            _, plan.num_adapters, plan.num_adapter_tokens = last
            return
        adapters = OrderedDict[int, None]()
        chunks = [(grant.request, grant.num_new_tokens) for grant in plan.chunks]
        for request, num_tokens in [*((request, 1) for request in decodes), *chunks]:
            if request.adapter is not None:
                adapters[request.adapter] = None
                plan.num_adapter_tokens += num_tokens
        plan.num_adapters = len(adapters)
        loads = [self._take(adapter) for adapter in adapters]
        self._last = None if plan.chunks else (decodes, plan.num_adapters, plan.num_adapter_tokens)
        if any(loads):
            plan.adapter_loads = loads.count("host"), loads.count("disk")
            self.num_loads += sum(plan.adapter_loads)
            self.num_from_disk += loads.count("disk")

    def _take(self, adapter: int) -> str:
        """Take `adapter` to a slot; return from where, empty if it was there."""
        slots, in_host = self._slots, self._in_host
        source = "" if adapter in slots else "host" if adapter in in_host else "disk"
        if source == "disk" and len(in_host) == self._limits.max_cpu_loras:
            slots.pop(in_host.popitem(last=False)[0], None)
        in_host[adapter] = None
        if source and len(slots) == self._limits.max_loras:
            slots.popitem(last=False)
        slots[adapter] = None
        in_host.move_to_end(adapter)
        slots.move_to_end(adapter)
        return source
