"""Whole steps of the suite: three models over batch and context, prompts of several lengths, as the engine runs them.
Decodes are replayed from CUDA graphs where the engine has them, prompts are launched eagerly. A sample is what a
serving run counts: building the index tensors, the step, and the sampled tokens back on the host."""

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

from perfmodel.evidence.fit.device import steps_scenario
from perfmodel_executors.device import device_clock
from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.measure.bench import StepBench, StepGrants
from perfmodel_executors.measure.cpu_steps import REFERENCE
from perfmodel_executors.measure.energy import joules_of
from perfmodel_executors.measure.protocol import DriftMeter, quantile, taken_ns, uninterrupted
from perfmodel_executors.models.support import CPU
from perfmodel_executors.runner import RunnerSetup, build_runner

_INT8, _INT4 = ("engine.quantization=w8a16",), ("engine.quantization=w4a16",)
MODELS = {  # with overrides of the suite's scenario
    "cuda": (("llama-3.1-8b", ()), ("qwen3-30b-a3b", ()), ("qwen3-1.7b", ()), ("llama-3.1-8b", _INT4)),
    "cpu": (("tiny-llama", ()), ("tiny-moe", ()), ("tiny-llama", _INT4), ("tiny-llama", _INT8)),
}
DECODES = {  # (batch, context)
    "cuda": (
        *((1, 512), (8, 1024), (32, 4096), (128, 1024), (1, 8192), (64, 512), (16, 4096)),
        *((4, 1024), (256, 512), (2, 2048), (32, 512), (128, 256), (8, 8192), (64, 2048)),
    ),
    "cpu": ((1, 64), (4, 256), (8, 128), (2, 512), (16, 64), (12, 192), (3, 96), (6, 384), (16, 256), (1, 256)),
}
PROMPTS = {  # (new tokens, tokens computed before)
    "cuda": ((512, 0), (2048, 0), (128, 0), (8192, 0), (1024, 0), (4096, 0), (2048, 6144), (256, 2048)),
    "cpu": ((64, 0), (256, 0), (32, 0), (128, 0), (96, 64), (256, 256)),
}
_SAMPLES = {"cuda": 15, "cpu": 7}
_BLOCKS = 12_000  # of 16 tokens: the largest step and some
_REFERENCE_SAMPLES = 41
_LOAD_S = 20.0  # a model's weights, random, and its first kernels


class _Shelf:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._loaded: dict[tuple[str, tuple[str, ...]], StepBench] = {}
        bench.holders.append(self._loaded.clear)

    def measure(self, model: str, overrides: tuple[str, ...], shape: StepGrants) -> dict[str, Any]:
        bench = self._bench
        if (model, overrides) not in self._loaded:
            bench.release_memory()  # of the last model, before the next one comes
            scenario = steps_scenario(model, overrides, bench.hardware.name)
            setup = RunnerSetup(scenario.model, scenario.engine, _BLOCKS, bench.device, kernels=bench.backend)
            self._loaded[model, overrides] = StepBench(build_runner(setup))
        steps = self._loaded[model, overrides]
        call = steps.step(shape)
        for _ in range(3):
            call()
        samples, clock_ns = [], device_clock(bench.device)
        with uninterrupted():
            for _ in range(_SAMPLES[bench.device.type]):
                call()  # another routing of the experts, and caches as this step leaves them
                pace = bench.drift.measure() if bench.drift is not None else 1.0
                samples.append(taken_ns(call, clock_ns) * 1e-9 * pace)
        joules = None if bench.energy is None else joules_of(call, bench.energy)
        fields = shape.batch_shape(steps.decoder.model.attention_spans)._asdict()
        return {
            "model": model,
            "overrides": overrides,
            # A step that is measured whole drafts nothing beside.
            "shape": {name: value for name, value in fields.items() if name not in ("drafting", "num_draft_tokens")},
            "seconds": quantile(samples, 0.5),
            "p10_s": quantile(samples, 0.1),
            "p90_s": quantile(samples, 0.9),
            **({} if joules is None else {"joules": joules}),
            "is_graphed": steps.is_graphed(shape),
        }


def reference_meter(reference_s: float | None = None) -> DriftMeter:
    """How fast this CPU is, by a small step; `reference_s`: what that step took when the meter was first set."""
    scenario = steps_scenario(*MODELS["cpu"][0], "cpu")
    steps = StepBench(build_runner(RunnerSetup(scenario.model, scenario.engine, _BLOCKS, CPU)))
    reference = steps.step(REFERENCE)
    if reference_s is None:
        for _ in range(3):
            reference()
        reference_s = quantile([taken_ns(reference) * 1e-9 for _ in range(_REFERENCE_SAMPLES)], 0.5)
    return DriftMeter(reference, reference_s)


def step_tasks(bench: Bench) -> Iterator[Task]:
    kind, shelf = bench.device.type, _Shelf(bench)
    decodes = [
        (f"batch {batch} context {context}", StepGrants(contexts=(context,) * batch))
        for batch, context in DECODES[kind]
    ]
    prompts = [(f"prompt {new} after {done}", StepGrants(chunks=((new, done, True),))) for new, done in PROMPTS[kind]]
    # In turns: a short budget sees both, and so does a device on which one of them fails.
    shapes = [shape for pair in zip_longest(decodes, prompts) for shape in pair if shape is not None]
    for model, overrides in MODELS[kind]:
        group = " ".join((model, *overrides))
        for rank, (label, shape) in enumerate(shapes):
            seconds = _LOAD_S if rank == 0 and kind == "cuda" else 2.0
            run = partial(shelf.measure, model, overrides, shape)
            yield Task("steps", f"{group} {label}", run, rank, seconds, group)
