"""Connectors of vLLM's, scheduler side, that do what a case says: which tokens are elsewhere, and when they come; which
images another engine has encoded.

They are loaded by name (`KVTransferConfig.kv_connector_module_path`), so they have a module of their own.
"""

__all__ = ["ScriptedConnector", "ScriptedEncodings"]

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """As the scheduler wants it; `script` is a case's requests, by their numbers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.script: list[dict[str, Any]] = []
        self.block_size = 1
        self.loads: dict[str, int] = {}  # outcomes until the KV of a request has come
        self.sends: dict[str, int] = {}  # outcomes until another engine has fetched it
        self.begun: dict[str, int] = {}  # in the plan that is being made: tokens that are there once it has come
        self._blocks: dict[str, list[int]] = {}
        self._seen: set[str] = set()

    # ---------------------------------------------------------------- what the scheduler asks

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        recorded = self.script[int(request.request_id)]
        is_async = recorded.get("load_steps") is not None
        if is_async and request.request_id in self._seen:
            return 0, False
        known = min(recorded.get("load", 0), request.num_tokens - (not is_async))
        new = max(known - num_computed_tokens, 0)
        return new, is_async and new > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        recorded, i = self.script[int(request.request_id)], request.request_id
        if recorded.get("load_steps") is not None and num_external_tokens and i not in self._seen:
            self.loads[i] = recorded["load_steps"]
            self.begun[i] = min(recorded["load"], request.num_tokens)
            num_local = (self.begun[i] - num_external_tokens) // self.block_size
            self._blocks[i] = blocks.get_block_ids()[0][num_local:]
        self._seen.add(i)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        steps = self.script[int(request.request_id)].get("send_steps")
        is_kept = steps is not None and request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        if is_kept:
            self.sends[request.request_id] = steps
        return is_kept, None

    # ---------------------------------------------------------------- what the workers would say

    def outcome(self) -> KVConnectorOutput:
        """What an outcome that is taken now says of the KV under way."""
        over: list[list[str]] = []
        for under_way in (self.loads, self.sends):
            for i in under_way:
                under_way[i] -= 1
            over.append(sorted((i for i, left in under_way.items() if left <= 0), key=int))
            for i in over[-1]:
                del under_way[i]
        loads, sends = over
        return KVConnectorOutput(finished_recving=loads, finished_sending=sends, invalid_block_ids=self._lost(loads))

    def _lost(self, loads: list[str]) -> set[int]:
        lost: set[int] = set()
        for i in loads:
            recorded, blocks = self.script[int(i)], self._blocks.pop(i)
            if recorded.get("loaded") is not None:  # the last blocks do not come, of those that were not here
                num_lost = -(-recorded["load"] // self.block_size) - recorded["loaded"] // self.block_size
                lost.update(blocks[max(len(blocks) - num_lost, 0) :] if num_lost > 0 else ())
        return lost

    # ---------------------------------------------------------------- of workers only

    def start_load_kv(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, *arguments: Any) -> None:
        raise NotImplementedError

    def save_kv_layer(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class ScriptedEncodings(ECConnectorBase):
    """Has the features of all images whose content is below `num_encoded`."""

    num_encoded = 0

    def has_cache_item(self, identifier: str) -> bool:
        return int(identifier.removeprefix("image ")) < self.num_encoded

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        return ECConnectorMetadata()

    # ---------------------------------------------------------------- of workers only

    def start_load_caches(self, encoder_cache: Any, **named: Any) -> None:
        raise NotImplementedError

    def save_caches(self, encoder_cache: Any, mm_hash: str, **named: Any) -> None:
        raise NotImplementedError
