"""The workers of vLLM's OffloadingConnector as a case says: loads take its outcomes, stores end with the next one."""

__all__ = ["OffloadJobs"]

from typing import Any


class OffloadJobs:
    """Jobs of vLLM's own scheduler side, its tier of a case's size behind it."""

    def __init__(self, connector: Any, config: dict[str, Any], recorded: list[dict[str, Any]]) -> None:
        connector.scheduler.manager._num_chunks = config["kv_offload"]["num_blocks"]
        self._recorded = recorded
        self._loads: dict[int, list[Any]] = {}  # job -> request, outcomes left
        self._stores: list[int] = []

    def begin(self, meta: Any) -> list[str]:
        """Take the jobs of a plan; the requests whose loads begin with it."""
        self._stores += meta.store_jobs
        for job, load in meta.load_jobs.items():
            self._loads[job] = [load.req_id, self._recorded[int(load.req_id)]["load_steps"]]
        return [load.req_id for load in meta.load_jobs.values()]

    def outcome(self) -> Any:
        """What workers would say with an outcome that is taken now."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        for load in self._loads.values():
            load[1] -= 1
        over = [job for job, (_, left) in self._loads.items() if left <= 0]
        received = {self._loads.pop(job)[0] for job in over}
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys([*over, *self._stores], 1))
        self._stores = []
        return KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=done)
