"""The kernels of many recorded figures as columns, so that a fit can price all of them at once."""

__all__ = ["KernelColumns", "Setting", "columns_of", "predicted_log_seconds"]

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.local.rows import LocalRow
from perfmodel.calibrate.local.steps import row_tests
from perfmodel.cost.forms.blocks import BlockSizes, block_sizes, piece_of, pieces
from perfmodel.cost.steps.stages import layer_split_of
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.work import BatchShape, Work
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario

_MATMULS = ("gemm", "moe")
_STREAMED = ("elementwise", "embedding", "sampling", "scan")


class Setting(NamedTuple):
    """A row with what stands for it, and the median of its figures; tokens per second."""

    row: LocalRow
    hardware: HardwareSpec
    scenario: Scenario
    measured: float


class KernelColumns(NamedTuple):
    """A row for each kernel, of each piece, of each step, of each test of each setting.

    test, setting: numbers that a kernel is of; test_setting: the setting of each test
    runs:     how often it runs, for each token of its test
    form:     number of the weights' format among `forms`, -1 for kernels that multiply none
    is_experts, is_attention: kinds of kernels
    sizes:    of multiplications and, in part, of the others; kv_bytes beside them
    """

    test: NDArray[Any]
    setting: NDArray[Any]
    test_setting: NDArray[Any]
    runs: NDArray[Any]
    form: NDArray[Any]
    is_experts: NDArray[Any]
    is_attention: NDArray[Any]
    sizes: BlockSizes
    kv_bytes: NDArray[Any]
    forms: tuple[str, ...]


def columns_of(settings: Sequence[Setting]) -> KernelColumns:
    """All kernels of `settings`."""
    forms: dict[str, int] = {}
    rows: list[tuple[float, ...]] = []
    test_setting: list[int] = []
    for number, setting in enumerate(settings):
        scenario = setting.scenario
        graph = build_graph(scenario.model, scenario.engine, sampling="default", hardware=scenario.hardware)
        budget = scenario.engine.max_num_batched_tokens
        split = layer_split_of(scenario.engine)
        for test in row_tests(setting.row, scenario.model.attention_spans, budget):
            for shape in test.shapes:
                share = split.share(shape.num_tokens) if split is not None else 1.0
                place = (float(len(test_setting)), float(number))
                for count, *sizes in _kernels(graph, shape, scenario.engine.ubatch_size, forms):
                    rows.append((*place, count * share / test.tokens, *sizes))
            test_setting.append(number)
    table = np.array(rows).T
    return KernelColumns(
        table[0].astype(int),
        table[1].astype(int),
        np.array(test_setting),
        table[2],
        table[3].astype(int),
        table[4] > 0,
        table[5] > 0,
        BlockSizes(*table[6:12]),
        table[12],
        tuple(forms),
    )


def _kernels(
    graph: StepGraph, shape: BatchShape, micro_batch: int, forms: dict[str, int]
) -> Iterable[tuple[float, ...]]:
    """(count, form, is_experts, is_attention, sizes ..., kv_bytes) of each kernel of a step."""
    for node in graph.nodes:
        work = node.work(shape)
        if not work.num_kernels:
            continue
        runs = node.expected_runs(shape)
        if work.family in _MATMULS:
            form = forms.setdefault(work.format.removesuffix("_wo") or "float", len(forms))
            for count, sizes in _pieces(work, shape, micro_batch):
                yield (runs * count, form, work.family == "moe", 0.0, *sizes, work.kv_bytes)
            continue
        launches = work.num_kernels
        if work.family == "attention_prefill" and micro_batch:
            launches *= -(-shape.num_tokens // micro_batch)
        num_bytes = work.weight_bytes + work.activation_bytes
        is_attention = work.family not in _STREAMED
        yield (runs, -1.0, 0.0, is_attention, work.flops, num_bytes, launches, 0.0, 1.0, 1.0, work.kv_bytes)


def _pieces(work: Work, shape: BatchShape, micro_batch: int) -> Iterable[tuple[int, BlockSizes]]:
    sizes = block_sizes(work)
    tokens = float(shape.num_tokens if work.family == "moe" else sizes.rows)
    for count, size in pieces(tokens, micro_batch):
        yield count, piece_of(sizes, work.weight_bytes, size / tokens)


def predicted_log_seconds(columns: KernelColumns, seconds: NDArray[Any], num_settings: int) -> NDArray[Any]:
    """log(seconds per token) of each setting from the seconds of each kernel: of the mean rate over its tests."""
    by_test = np.bincount(columns.test, columns.runs * seconds, len(columns.test_setting))
    tests = np.bincount(columns.test_setting, minlength=num_settings)
    rate = np.bincount(columns.test_setting, 1.0 / by_test, num_settings) / tests
    result: NDArray[Any] = -np.log(rate)
    return result
