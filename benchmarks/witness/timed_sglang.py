"""SGLang's event loops, scheduler and radix tree under `SglangTimePredictor` in virtual time: reads workloads, writes
when tokens came.

    python timed_sglang.py CASES.json OUT.json      in an environment with sglang, and perfmodel on its path

As `sglang_scheduler` has it, but requests come at their seconds, a forward pass ends when the predicted time is over,
and the result of a pass is processed no earlier. The predictor is asked as SGLang's simulator asks it, and by what
SGLang's own hooks put in place of the simulator's choice of a predictor.
"""

__all__ = ["run_case"]

import json
import logging
import sys
import types
from collections import deque
from pathlib import Path
from typing import Any

import sglang_scheduler
from sglang.srt.plugins.hook_registry import HookRegistry
from virtual_time import VirtualTime

from perfmodel_executors.engines import plugins

_SIMULATOR = "sglang_simulator.simulation.manager.config"


class _ConfigManager:
    """The part of the simulator's that hands out predictors; SGLang is installed without its simulator."""

    asked: dict[str, Any]

    @classmethod
    def _get_raw_config(cls) -> dict[str, Any]:
        return {"predictor": cls.asked}

    @classmethod
    def get_inference_time_predictor(cls, model: Any, hw: Any, sched_config: Any) -> Any:
        """The simulator's own have names that are not ours."""
        raise ValueError(f"Unknown predictor name: {cls.asked.get('name')}")


def _register() -> None:
    """What `load_plugins` of SGLang does with our entry point, where its simulator is."""
    parts = _SIMULATOR.split(".")
    for depth in range(1, len(parts) + 1):
        module: Any = types.ModuleType(".".join(parts[:depth]))
        module.__path__, module.__spec__ = [], types.SimpleNamespace(name=module.__name__)
        sys.modules[module.__name__] = module
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
    sys.modules[_SIMULATOR].ConfigManager = _ConfigManager  # type: ignore[attr-defined]
    plugins.register_in_sglang()
    HookRegistry.apply_hooks()


class _TimedCase(sglang_scheduler.Case):
    def __init__(self, case: dict[str, Any], *scheduler: Any) -> None:
        self.clock, self.free_at_s = VirtualTime(), 0.0
        _ConfigManager.asked = {"name": "perfmodel", "scenario": case["scenario"], "set": case["set"]}
        self.predictor = _ConfigManager.get_inference_time_predictor(None, None, None)
        self.ends: deque[float] = deque()  # of passes whose results are not processed
        self.times: list[list[float]] = [[] for _ in case["requests"]]
        requests = [{**request, "arrival": request["arrival_s"]} for request in case["requests"]]
        super().__init__({"config": case["engine"], "requests": requests}, *scheduler)
        process = self.scheduler.process_batch_result

        def process_in_time(batch: Any, result: Any) -> None:
            end_s = self.ends.popleft()
            self.clock.sleep(max(0.0, end_s - self.clock.now_s))
            known = [len(request.output_ids) for request in batch.reqs]
            process(batch, result)
            for request, before in zip(batch.reqs, known, strict=True):
                self.times[int(request.rid)] += [self.clock.now_s] * (len(request.output_ids) - before)

        self.scheduler.process_batch_result = process_in_time

    def now(self) -> float:
        if self.pending and not self.ends and all(request.finished() for request in self.requests):
            self.clock.sleep(max(0.0, self.recorded[self.pending[0]]["arrival"] - self.clock.now_s))
        return self.clock.now_s

    def forward(self, batch: Any) -> Any:
        result = super().forward(batch)
        passed = [types.SimpleNamespace(extend_length=n, past_kv_length=done) for _, done, n in self.steps[-1][1]]
        duration_s = self.predictor.predict_infer_time(types.SimpleNamespace(reqs=passed))
        self.free_at_s = max(self.free_at_s, self.clock.now_s) + duration_s
        self.ends.append(self.free_at_s)
        return result


def run_case(case: dict[str, Any], *scheduler: Any) -> list[list[float]]:
    """[first token, last token] in seconds, of each request."""
    run = _TimedCase(case, *scheduler)
    run.run()
    return [[own[0], own[-1]] for own in run.times]


def main(cases_file: str, out_file: str) -> None:
    """Run all workloads of a file."""
    logging.disable(logging.CRITICAL)
    _register()
    cases, results = json.loads(Path(cases_file).read_text(encoding="utf-8")), []
    with sglang_scheduler.published_arguments() as scheduler:
        for case in cases:
            results.append(run_case(case, *scheduler))
            print(".", end="", flush=True, file=sys.stderr)
    document = {"version": sglang_scheduler.sglang.__version__, "times": results}
    Path(out_file).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
