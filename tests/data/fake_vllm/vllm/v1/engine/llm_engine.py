"""An engine that runs all it has: chunks of prompts up to the budget, then a token, or two where one is drafted."""

import json
import time
from pathlib import Path
from types import SimpleNamespace as Named

_STEP_S = 0.005


class _Scheduler:
    def __init__(self, args):
        self.args, self.requests, self.running, self.waiting = args, {}, [], []
        pool = Named(num_gpu_blocks=args.num_gpu_blocks_override, get_num_free_blocks=lambda: self._num_free())
        self.kv_cache_manager = Named(block_pool=pool)

    def _num_free(self):
        used = sum(-(-r.num_computed_tokens // self.args.block_size) for r in self.running)
        return self.args.num_gpu_blocks_override - 1 - used

    def schedule(self):
        while self.waiting and len(self.running) < self.args.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        budget, granted, drafts = self.args.max_num_batched_tokens, {}, {}
        for r in self.running:
            count = min(budget, r.num_tokens - r.num_computed_tokens)
            if count == 1 and r.outputs and getattr(self.args, "speculative_config", None):
                drafts[r.name], count = [7], 2
            if count:
                granted[r.name] = count
                r.num_computed_tokens += count
                budget -= count
        return Named(
            num_scheduled_tokens=granted,
            total_num_scheduled_tokens=sum(granted.values()),
            scheduled_spec_decode_tokens=drafts,
            preempted_req_ids=set(),
        )

    def update_from_output(self, plan, sampled):
        del plan, sampled


class LLMEngine:
    """Every answer is the request's number; of drafts every other one is right."""

    @classmethod
    def from_engine_args(cls, args):
        assert json.loads(Path(args.model, "config.json").read_text())["architectures"]
        return cls(args)

    def __init__(self, args):
        self.scheduler = _Scheduler(args)
        self.engine_core = Named(engine_core=Named(scheduler=self.scheduler))
        blocks = {"num_gpu_blocks": args.num_gpu_blocks_override, "block_size": args.block_size}
        cache = Named(**blocks, enable_prefix_caching=False)  # whatever was asked for
        compilation = Named(mode=0, cudagraph_mode=0, static_forward_context={})
        self.vllm_config = Named(
            cache_config=cache, scheduler_config=Named(max_num_seqs=args.max_num_seqs), compilation_config=compilation
        )
        self.num_drafts = 0

    def add_request(self, request_id, prompt, params, priority=0):
        del priority
        ids = prompt["prompt_token_ids"]
        own = f"{request_id}-{len(self.scheduler.requests):x}"
        request = Named(
            name=own, outputs=[], num_tokens=len(ids), num_computed_tokens=0, most=params.max_tokens, prompt=ids
        )
        self.scheduler.requests[own] = request
        self.scheduler.waiting.append(request)
        return own

    def has_unfinished_requests(self):
        return bool(self.scheduler.running or self.scheduler.waiting)

    def reset_prefix_cache(self):
        return True

    def step(self):
        plan = self.scheduler.schedule()
        time.sleep(_STEP_S)
        outputs = [each for name in plan.num_scheduled_tokens if (each := self._output(name, plan)) is not None]
        self.scheduler.update_from_output(plan, None)
        return outputs

    def _output(self, name, plan):
        r = self.scheduler.requests[name]
        ids = [len(r.prompt)] if not plan.scheduled_spec_decode_tokens.get(name) else self._verified(r)
        if r.num_computed_tokens < r.num_tokens:
            return None
        ids = ids[: r.most - len(r.outputs)]
        r.outputs += ids
        r.num_tokens += len(ids)
        if len(r.outputs) == r.most:
            self.scheduler.running.remove(r)
        finished = len(r.outputs) == r.most
        return Named(
            request_id=name.split("-")[0], finished=finished, num_cached_tokens=0, outputs=[Named(token_ids=ids)]
        )

    def _verified(self, request):
        self.num_drafts += 1
        if self.num_drafts % 2:
            return [len(request.prompt)] * 2
        request.num_computed_tokens -= 1  # the draft was wrong
        return [len(request.prompt)]
