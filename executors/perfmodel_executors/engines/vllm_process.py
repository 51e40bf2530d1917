"""Runs a load on vLLM, in vLLM's own interpreter: `python -P vllm_process.py JOB FD`. Standard library and vLLM alone.

A step begins when the one before it has handed out its tokens, or when the first request comes to an idle engine.

JOB is a JSON file: `arguments` of vLLM's EngineArgs, `version` (None: any), `kind` of device, and `loads`, which are
run one after another, the prefix cache emptied between them. A load has `sampling` parameters, `chains` of requests,
and `concurrency`. A chain is a conversation, or one request: `[id, pause_ns, prompt tokens that are new, output tokens,
priority, think_ns]` each; a pause counts from the answer before, a chain's first from the start of the load, the time
that a user of a closed loop thinks from the answer to it. FD takes lines of JSON, each a list: what it is, and its
values; times are in ns since the start of the load.

    ["ready", facts]                                  the engine is loaded
    ["step", StepRecord's fields, chunks, gaps]       chunks: [tokens, tokens computed before] of each prompt's part
    ["request", RequestColumns' fields]
    ["done", totals]                                  a load is over
    ["error", kind, text]
"""

import heapq
import importlib
import json
import os
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

_FLUSH_NS = 1_000_000_000  # lines are written when nothing is to do, or once a second: the reader may share the core


class _Sender:
    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", encoding="utf-8", newline="\n")
        self._lines: list[str] = []
        self.written_at = 0

    def send(self, *line: Any) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")))

    def flush(self) -> None:
        if self._lines:
            self._file.write("\n".join(self._lines) + "\n")
            self._file.flush()
            self._lines.clear()
        self.written_at = time.monotonic_ns()


class _Arrivals:
    """What comes when: chains at their own times, or each as one of `concurrency` users is free for it."""

    def __init__(self, load: dict[str, Any]) -> None:
        self._waiting = deque(load["chains"])
        self._is_closed = load["concurrency"] is not None
        self._users = [0] * (load["concurrency"] or 0)  # when each begins another chain
        self._due: list[tuple[int, int, list[list[Any]]]] = []  # chains that go on

    def _begins(self) -> list[int]:
        if not self._waiting or (self._is_closed and not self._users):
            return []
        return [self._users[0] if self._is_closed else self._waiting[0][0][1]]

    @property
    def next_ns(self) -> int | None:
        return min([*self._begins(), *(chain[0] for chain in self._due[:1])], default=None)

    def pop(self) -> tuple[int, list[Any], list[list[Any]]]:
        """(when it came, the request, those of its chain to come)"""
        now = self.next_ns
        assert now is not None
        if now not in self._begins():
            _, _, chain = heapq.heappop(self._due)
        else:
            chain = self._waiting.popleft()
            if self._is_closed:
                heapq.heappop(self._users)
        return now, chain[0], chain[1:]

    def on_finished(self, request: list[Any], later: list[list[Any]], now: int) -> None:
        if later:
            heapq.heappush(self._due, (now + later[0][1], later[0][0], later))
        elif self._is_closed:
            heapq.heappush(self._users, now + request[5])


class _StepLog:
    """What vLLM's scheduler plans, seen at `schedule`; the driver says when a plan's tokens are out."""

    def __init__(self, scheduler: Any, now: Any) -> None:
        self._scheduler, self._now = scheduler, now
        self._plans: deque[list[Any]] = deque()
        self._num_steps = 0
        self.last_end = 0  # or when the first request came to an idle engine
        self.first_scheduled: dict[str, int] = {}
        self.preemptions: dict[str, int] = {}
        self.examined, self.accepted, self.num_offered = [0], [0], 0  # drafted tokens by depth, as MeasuredAcceptance
        self._num_done = 0  # plans whose tokens are known and not out
        self._schedule, scheduler.schedule = scheduler.schedule, self._logged
        self._update, scheduler.update_from_output = scheduler.update_from_output, self._updated
        self.blocks = scheduler.kv_cache_manager.block_pool

    def _logged(self, *args: Any, **kwargs: Any) -> Any:
        started = self._now()
        plan = self._schedule(*args, **kwargs)
        for name in plan.preempted_req_ids or ():
            self.preemptions[name] = self.preemptions.get(name, 0) + 1
        if plan.total_num_scheduled_tokens:
            self._plans.append(self._row(plan, started))
        return plan

    def _updated(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        self._num_done += bool(plan.total_num_scheduled_tokens)
        return self._update(plan, *args, **kwargs)

    def _row(self, plan: Any, started: int) -> list[Any]:
        """A StepRecord's fields but for its end, [tokens, computed before] of its chunks, and whom it drafts for."""
        drafts = plan.scheduled_spec_decode_tokens
        chunks, context, decodes = [], 0, []
        for name, count in plan.num_scheduled_tokens.items():
            self.first_scheduled.setdefault(name, started)
            request = self._scheduler.requests[name]
            plain = count - len(drafts.get(name, ()))
            before = request.num_computed_tokens - count  # `schedule` has counted them already
            if plain > 1:
                chunks.append([plain, before])
            else:
                decodes.append(name)
                context += before + 1
        drafted = sum(map(len, drafts.values()))
        tokens = plan.total_num_scheduled_tokens - drafted
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        used = self.blocks.num_gpu_blocks - 1 - self.blocks.get_num_free_blocks()
        drafted_by = {name: len(drafts.get(name, ())) for name in decodes}
        row = [tokens, len(decodes), context, len(chunks), running, waiting, used, 0, len(drafts), drafted]
        return [row, chunks, drafted_by]

    def close(self) -> None:
        self._scheduler.schedule, self._scheduler.update_from_output = self._schedule, self._update

    def end(self, now: int, num_tokens: dict[str, int]) -> tuple[list[int], list[Any]] | None:
        """The oldest plan's record, and its chunks; num_tokens: that its requests got. None where none is done."""
        if not self._num_done:
            return None
        self._num_done -= 1
        row, chunks, drafted = self._plans.popleft()
        start, self.last_end = self.last_end, now
        accepted = [self._judge(count, num_tokens.get(name, 1) - 1) for name, count in drafted.items()]
        self._num_steps += 1
        return [self._num_steps - 1, 1, start, now, now - start, *row, sum(accepted)], chunks

    def _judge(self, num_drafted: int, num_right: int) -> int:
        """Count the tokens that were drafted for a sequence; a drafter that had none to offer counts as wrong."""
        for counts in (self.examined, self.accepted):
            counts += [0] * (num_drafted - len(counts))
        self.num_offered += num_drafted > 0
        for depth in range(max(1, min(num_drafted, num_right + 1))):
            self.examined[depth] += 1
        for depth in range(num_right):
            self.accepted[depth] += 1
        return num_right


class _Request:
    def __init__(self, arrival: int, fields: list[Any], later: list[Any], prompt: list[int]) -> None:
        self.arrival, self.fields, self.later = arrival, fields, later
        self.prompt = prompt + fields[2]
        self.num_prompt = len(self.prompt)
        self.first = self.last = self.cached = 0
        self.outputs: list[int] = []


class _LoadRun:
    def __init__(self, engine: Any, params: Any, load: dict[str, Any], sender: _Sender) -> None:
        self._engine, self._params, self._sender = engine, params, sender
        self._load = _Arrivals(load)
        self._under_way: dict[str, _Request] = {}
        self._own_names: dict[str, str] = {}  # vLLM's name of a request: ours, and random letters behind it
        self._prompts: dict[int, list[int]] = {}  # by the id of the next request of a chain
        self._prefix_tokens = [0, 0]
        self._started = time.monotonic_ns()
        self._log = _StepLog(engine.engine_core.engine_core.scheduler, self.now)

    def now(self) -> int:
        return time.monotonic_ns() - self._started

    def serve(self) -> dict[str, Any]:
        while self._under_way or self._load.next_ns is not None:
            self._add_due()
            if self._under_way:
                self._step()
                if time.monotonic_ns() - self._sender.written_at > _FLUSH_NS:
                    self._sender.flush()
                continue
            self._sender.flush()
            due = self._load.next_ns
            if due is not None:
                time.sleep(max(0, due - self.now()) / 1e9)
        self._log.close()
        return {
            "num_preemptions": sum(self._log.preemptions.values()),
            "prefix_tokens_asked": self._prefix_tokens[0],
            "prefix_tokens_hit": self._prefix_tokens[1],
            "acceptance": [self._log.examined, self._log.accepted, self._log.num_offered],
        }

    def _add_due(self) -> None:
        now = self.now()
        while (due := self._load.next_ns) is not None and due <= now:
            if not self._under_way:
                self._log.last_end = now
            arrival, fields, later = self._load.pop()
            request = _Request(arrival, fields, later, self._prompts.pop(fields[0], []))
            prompt, params = {"prompt_token_ids": request.prompt}, self._params(fields[3])
            name = self._engine.add_request(str(fields[0]), prompt, params, priority=fields[4])
            name = name or str(fields[0])  # older versions return none
            self._under_way[name], self._own_names[str(fields[0])] = request, name
            now = self.now()

    def _step(self) -> None:
        outputs = self._engine.step()
        now = self.now()
        num_tokens: dict[str, int] = {}
        gaps: list[int] = []
        for output in outputs:
            name = self._own_names.get(output.request_id, output.request_id)
            request = self._under_way[name]
            ids = output.outputs[0].token_ids
            if ids:
                num_tokens[name] = len(ids)
                if request.outputs:
                    gaps.append(now - request.last)
                else:
                    request.first, request.cached = now, output.num_cached_tokens or 0
                request.outputs += ids
                request.last = now
            if output.finished:
                self._finish(name, now)
        record = self._log.end(now, num_tokens)
        if record is not None:
            self._sender.send("step", *record, gaps)

    def _finish(self, name: str, now: int) -> None:
        request = self._under_way.pop(name)
        number, later = request.fields[0], request.later
        del self._own_names[str(number)]
        self._prefix_tokens[0] += request.num_prompt
        self._prefix_tokens[1] += request.cached
        scheduled = self._log.first_scheduled.pop(name)
        row = [number, request.arrival, scheduled, request.first, now, request.num_prompt, len(request.outputs)]
        self._sender.send("request", [*row, request.cached, self._log.preemptions.get(name, 0)])
        if later:
            self._prompts[later[0][0]] = request.prompt + request.outputs
        self._load.on_finished(request.fields, later, now)


def _scalars(config: Any) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in sorted(vars(config)) if not name.startswith("_")}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str | None)}


def _facts(vllm: Any, engine: Any) -> dict[str, Any]:
    config = engine.vllm_config
    parts = ("model_config", "cache_config", "scheduler_config", "parallel_config", "speculative_config")
    platform = importlib.import_module("vllm.platforms").current_platform
    torch = importlib.import_module("torch")
    used = {part: _scalars(getattr(config, part)) for part in parts if getattr(config, part, None) is not None}
    compilation = config.compilation_config
    used["compilation_config"] = {"mode": str(compilation.mode), "cudagraph_mode": str(compilation.cudagraph_mode)}
    layers = [layer for layer in compilation.static_forward_context.values() if hasattr(layer, "get_attn_backend")]
    return {
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "device": str(platform.get_device_name()),
        "num_threads": torch.get_num_threads(),
        "attention_backends": sorted({layer.get_attn_backend().get_name() for layer in layers}),
        "used": used,
        "num_blocks": config.cache_config.num_gpu_blocks - 1,  # one of vLLM's is the null block
    }


def _with_architecture(folder: str) -> None:
    """Name the class of a written config.json that has none: that of its `model_type` in transformers."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"architectures": []}
    if "architectures" not in config:
        names = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if config.get("model_type") in names:
            config["architectures"] = [names[config["model_type"]]]
            file.write_text(json.dumps(config), encoding="utf-8", newline="\n")


class _RefusedError(Exception):
    """kind, text: for the parent to word."""


def _release(version: str) -> str:
    """The version without build, and without trailing zeros: 0.30 of 0.30.0+cpu."""
    return re.sub(r"(\.0)+$", "", version.split("+")[0].removeprefix("v"))


def _engine(job: dict[str, Any]) -> tuple[Any, Any]:
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise _RefusedError("absent" if error.name == "vllm" else "broken", f"{error}") from error
    except Exception as error:  # of another package, or of the machine: not that vLLM is absent
        raise _RefusedError("broken", f"{type(error).__name__}: {error}") from error
    if job["version"] is not None and _release(vllm.__version__) != _release(job["version"]):
        raise _RefusedError("version", vllm.__version__)
    kind = importlib.import_module("vllm.platforms").current_platform.device_type
    if (kind == "cpu") != (job["kind"] == "cpu"):
        raise _RefusedError("device", kind)
    _with_architecture(job["arguments"]["model"])
    try:
        arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs(**job["arguments"])
        engine = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(arguments)
    except Exception as error:
        raise _RefusedError("refused", f"{type(error).__name__}: {error}") from error
    return vllm, engine


def _sampling(load: dict[str, Any]) -> Any:
    module = importlib.import_module("vllm.sampling_params")
    how = {"ignore_eos": True, "detokenize": False, "output_kind": module.RequestOutputKind.DELTA}
    return lambda num_tokens: module.SamplingParams(max_tokens=num_tokens, **how, **load["sampling"])


def main(job_file: str, fd: int) -> int:
    """Run the loads of the job; 0 where they came to their end, or an error was told."""
    sender = _Sender(fd)
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        vllm, engine = _engine(job)
        for number in range(2):  # before the clock starts: what is compiled or allocated at first use
            prompt = {"prompt_token_ids": [1 + number] * job["warm_up_tokens"]}
            engine.add_request(f"warm-up {number}", prompt, _sampling(job["loads"][0])(4))
        while engine.has_unfinished_requests():
            engine.step()
        sender.send("ready", _facts(vllm, engine))
        for load in job["loads"]:
            sender.flush()
            engine.reset_prefix_cache()
            sender.send("done", _LoadRun(engine, _sampling(load), load, sender).serve())
    except _RefusedError as refused:
        sender.send("error", *refused.args)
    except Exception as error:  # whatever vLLM raises in the middle is told, with its place in the log
        sender.send("error", "failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        sender.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
