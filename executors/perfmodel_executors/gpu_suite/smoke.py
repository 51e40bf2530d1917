"""Smoke: before anything is timed, does it run here, and is it right? Seconds a check, some ninety in all on a GPU.

    kernels   every operator's tiny problems in fp32, bf16 and fp16, against the reference in fp32
    graphs    tiny models served with captured decodes and without: equal tokens, in fp32
    parity    Hugging Face's `transformers`, where it is installed: equal weights, equal logits in fp32

Kernels run with their first tiles here, so that few are compiled.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario
from perfmodel_executors.gpu_suite.kernels import worst_difference
from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.graphs import Capture, CudaCapture, no_capture
from perfmodel_executors.kernels.dispatch import KERNELS, load_kernels
from perfmodel_executors.kernels.launch import KernelError
from perfmodel_executors.kernels.problem import Problem, problems_of
from perfmodel_executors.quality.measure import exact_match, greedy_outputs
from perfmodel_executors.run import as_executed
from perfmodel_executors.runner import RunnerSetup, build_runner

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SERVED = (  # models and overrides whose tokens are compared
    ("tiny-llama", ()),
    ("tiny-moe", ()),
    ("tiny-llama", ("engine.quantization=w4a16",)),
    ("tiny-llama", ("engine.kv_cache_dtype=fp8",)),
    ("tiny-mla", ()),
    ("tiny-gemma", ()),
)
_BLOCKS = 256
_PROMPTS = (5, 17, 33, 64, 2, 40)  # tokens
_ANSWER = 12
_FEWER = 2  # prompts and tokens in Triton's interpreter, which takes a second a step
_LIMIT_S = 45.0
# Compared with the device's own kernels; the others with torch's, so that no kernel is compiled for their sizes alone.
_WITH_KERNELS = ("llama-llama3", "qwen3-moe", "gemma2", "gpt-oss", "deepseek-v3")
_GUESS_S = 1.0


def smoke_tasks(bench: Bench) -> Iterator[Task]:
    """Each operator's first problem, then what puts kernels together, then all other problems."""

    def task(key: str, group: str, check: Callable[[], Mapping[str, Any]], rank: int) -> Task:
        return Task("smoke", key, partial(_timed, check), rank, _GUESS_S, group, _LIMIT_S)

    problems = [
        (rank, task(f"{problem} in {name}", operator, partial(check_problem, problem, bench), 2 * min(rank, 1)))
        for operator in KERNELS
        for name, dtype in dtypes_of(bench).items()
        for rank, problem in enumerate(problems_of(operator, "tiny", dtype))
    ]
    yield from (check for rank, check in problems if rank == 0)
    if bench.device.type == "cpu" or bench.backend == "triton":  # torch's kernels are not captured on a GPU
        for model, overrides in SERVED:
            key = " ".join(("graphs", model, *overrides))
            yield task(key, "graphs", partial(check_tokens, model, overrides, bench), 1)
    yield from (check for rank, check in sorted(problems, key=lambda pair: pair[0]) if rank > 0)
    if find_spec("transformers") is not None and find_spec("safetensors") is not None:
        from perfmodel_executors.parity import REFERENCES

        for name in sorted(REFERENCES, key=lambda name: name not in _WITH_KERNELS):
            yield task(f"parity {name}", "parity", partial(check_parity, name, bench), 3)


def dtypes_of(bench: Bench) -> Mapping[str, torch.dtype]:
    return {name: dtype for name, dtype in _DTYPES.items() if not (_is_interpreted(bench) and name == "bfloat16")}


def _is_interpreted(bench: Bench) -> bool:
    return bench.device.type == "cpu" and bench.backend == "triton"


def _timed(check: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    start = time.monotonic()
    return {**check(), "wall_s": time.monotonic() - start}


def check_problem(problem: Problem, bench: Bench) -> dict[str, Any]:
    """The kernel against the reference, in fp32 but for what is stored in fewer bits; raises KernelError."""
    operator = getattr(load_kernels(bench.backend), problem.operator)
    worst = worst_difference(problem, operator, bench, seed=1, in_fp32=True)
    return {"kind": "kernel", "error": worst, "tolerance": problem.tolerance}


def served_scenario(model: str, overrides: tuple[str, ...], bench: Bench) -> Scenario:
    limits = (
        *(f"hardware={bench.hardware.name}", f"model={model}", f"engine.num_gpu_blocks_override={_BLOCKS}"),
        *("engine.dtype=float32", "engine.max_model_len=512", "engine.max_num_batched_tokens=64"),
        "engine.max_num_seqs=8",
    )
    return as_executed(load_scenario("executor/mixed", [*limits, *overrides]))


def check_tokens(model: str, overrides: tuple[str, ...], bench: Bench) -> dict[str, Any]:
    """Greedy answers with captured decodes against those with the same steps launched one by one."""
    scenario = served_scenario(model, overrides, bench)
    capture: Capture = CudaCapture(bench.device, tunes=False) if bench.device.type == "cuda" else no_capture
    generator = torch.Generator().manual_seed(1)
    vocab = scenario.model.vocab_size
    lengths, answer = (_PROMPTS[:_FEWER], _FEWER) if _is_interpreted(bench) else (_PROMPTS, _ANSWER)
    prompts = [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
    answers = []
    for is_eager in (False, True):
        engine = scenario.engine.model_copy(update={"enforce_eager": is_eager})
        setup = RunnerSetup(scenario.model, engine, _BLOCKS, bench.device, kernels=bench.backend)
        runner = build_runner(setup, capture=None if is_eager else capture)
        assert (runner.graphs is None) is is_eager
        answers.append(greedy_outputs(scenario, runner, prompts, answer))
    return {"kind": "graphs", "error": 1.0 - exact_match(*answers), "tolerance": 0.0}


def check_parity(name: str, bench: Bench) -> dict[str, Any]:
    """The decoder on this device against the reference on the CPU: the largest difference of a logit. Raises
    KernelError where the likeliest tokens are others."""
    from perfmodel_executors.parity import REFERENCES, TOLERANCE, build, executed, largest_difference

    reference = REFERENCES[name]
    kernels = load_kernels(bench.backend if name in _WITH_KERNELS else "torch")
    with TemporaryDirectory() as folder:
        model = build(reference)
        worst = largest_difference(executed(reference, model, Path(folder), bench.device, kernels), model)
    if not math.isfinite(worst):
        raise KernelError(f"{name}: the likeliest tokens are not those of transformers.")
    return {"kind": "parity", "error": worst, "tolerance": TOLERANCE}
