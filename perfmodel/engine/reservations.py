"""`Reservations`: for how many tokens a request is given KV blocks when it joins, and who could never join."""

__all__ = ["Reservations"]

from perfmodel.engine.batching import Discipline
from perfmodel.engine.config import SchedulerConfig
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.request import Request
from perfmodel.errors import WorkloadError


class Reservations:
    """What `config` and its batching `discipline` set apart for a request."""

    def __init__(self, config: SchedulerConfig, discipline: Discipline) -> None:
        self._config = config
        self._discipline = discipline
        self._spare_slots = config.speculation.spare_slots if config.speculation is not None else 0

    def num_tokens(self, request: Request, needed: int) -> int:
        """Tokens that a request is given blocks for when it joins; `needed` now."""
        config = self._config
        is_known = config.reserves_output and (config.is_contiguous or not self._discipline.reserves_all)
        if is_known:
            outputs = request.max_output_tokens
            if config.rounds_output:
                outputs = 1 << (outputs - 1).bit_length()
            return min(request.num_prompt_tokens + outputs - 1, config.max_model_len) + self._spare_slots
        if config.is_contiguous or self._discipline.reserves_all:
            return config.max_model_len + self._spare_slots
        return needed

    def check_can_ever_run(self, request: Request, blocks: KVBlockManager) -> None:
        """Raise WorkloadError for a request that an empty engine with these `blocks` could not serve."""
        config = self._config
        longest = request.num_prompt_tokens + request.max_output_tokens - 1  # the last token sampled is never computed
        if longest > config.max_model_len:
            raise WorkloadError(
                f"request {request.request_id} needs {longest} tokens ({request.num_prompt_tokens} of prompt), above "
                f"max_model_len={config.max_model_len}; raise it or shorten the request"
            )
        is_whole = self._discipline.uses_budget and not (config.enable_chunked_prefill and config.keeps_kv)
        is_kept = config.reserves_output and config.keeps_kv
        at_once = request.num_prompt_tokens if is_kept else longest  # it may be recomputed in whole
        if request.num_transferred_tokens and config.reserves_output:
            at_once = 1
        if is_whole and at_once > config.max_num_batched_tokens:
            raise WorkloadError(
                f"request {request.request_id} may have to compute {at_once} tokens at once, above "
                f"max_num_batched_tokens={config.max_num_batched_tokens}; raise it or "
                + ("set enable_chunked_prefill" if config.keeps_kv else "keep the KV cache")
            )
        most = max(self.num_tokens(request, longest), longest + self._spare_slots)
        if blocks.num_filled(most) + blocks.num_buffers > blocks.num_blocks:
            raise WorkloadError(
                f"request {request.request_id} needs KV blocks for {most} tokens, but the pool has {blocks.num_blocks} "
                f"blocks of {blocks.block_size}; shorten it, or give the KV cache more memory"
            )
