"""Techniques of the suite: a scenario served with a technique and without, each side a record of its own.

On a GPU the pairs of `scenarios/executor/pairs`, on a CPU those of the same names in `scenarios/techniques`, whose
models one core gets through.
"""

__all__ = ["PAIRS", "pair_tasks", "pair_tasks_of", "sides_of"]

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from perfmodel.calibrate.measured.records import SIDES
from perfmodel.errors import SpecError
from perfmodel.files.blocks import block_as
from perfmodel.files.catalog import data_dir
from perfmodel.specs.scenario_file import load_scenario
from perfmodel.validate.techniques.runs import Technique
from perfmodel_executors.gpu_suite.parts.serving import serve
from perfmodel_executors.gpu_suite.task import Bench, Task

_FOLDERS = {"cuda": "executor/pairs", "cpu": "techniques"}
PAIRS = (
    *("int4-weights", "fp8-kv", "continuous-batching", "chunked-prefill", "prefix-cache", "fp8-weights"),
    *("grouped-query", "int8-weights", "int8-kv", "speculation-quantized-self", "flash-attention", "cuda-graphs"),
)
_GUESS_S = {"cuda": 25.0, "cpu": 8.0}


def pair_tasks(bench: Bench) -> Iterator[Task]:
    """The pairs, the most informative first, of those that the device's folder has."""
    folder = data_dir("scenarios") / _FOLDERS[bench.device.type]
    yield from pair_tasks_of([path for name in PAIRS if (path := folder / f"{name}.yaml").is_file()], bench)


def pair_tasks_of(files: Sequence[Path], bench: Bench) -> Iterator[Task]:
    """Both sides of each file's pair, one after the other."""
    for rank, file in enumerate(files):
        name = file.relative_to(data_dir("scenarios")).with_suffix("").as_posix()
        for side, overrides in zip(SIDES, sides_of(name), strict=True):
            run = partial(serve, name, [f"hardware={bench.hardware.name}", *overrides], bench)
            yield Task("pairs", f"{file.stem} {side}", run, rank, _GUESS_S[bench.device.type], file.stem)


def sides_of(name: str) -> tuple[Sequence[str], Sequence[str]]:
    """Overrides that leave the technique in the scenario, and that take it out."""
    technique = block_as(load_scenario(name).technique, Technique)
    if technique is None:
        raise SpecError(f"{name}: found no `technique` block; give its name, baseline and metric.")
    return (), technique.baseline
