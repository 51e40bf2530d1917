"""What the measuring programme writes is what calibration reads: serving problems as tables, grouped by the forms."""

from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.cost.kernel_models.device import DeviceFacts  # noqa: E402
from perfmodel.cost.kernel_models.experts import GroupedExpertsFit  # noqa: E402
from perfmodel.evidence.fit.attention import DECODES, PROMPTS  # noqa: E402
from perfmodel.evidence.fit.device import TABLES, kernel_tables, small_kernels  # noqa: E402
from perfmodel.evidence.fit.kernels import predict  # noqa: E402
from perfmodel.evidence.fit.products import GEMM, MOE  # noqa: E402
from perfmodel.evidence.fit.systems import MODULES as TABLE_MODULES  # noqa: E402
from perfmodel.evidence.sources.measured import KernelRecord  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.kernels.dispatch import KERNELS  # noqa: E402
from perfmodel_executors.kernels.problem import problems_of  # noqa: E402

HARDWARE = load_hardware("h100-sxm-80gb")
DEVICE = DeviceFacts.of(HARDWARE)
SLOW = 3.0  # times what the datasheet allows: no row beats the hardware
MODULES = {
    "gemm": GEMM,
    "context_attention": PROMPTS,
    "generation_attention": DECODES,
    "moe": MOE,
}
# Measured and not fitted: attention that no model's step runs (standard), kinds whose form is that of plain attention
# and whose tables have no column for what is theirs, scans, which have no table, and what runs another one's kernel.
COMPARED = frozenset(
    {
        *("attention_latent_decode", "attention_latent_prefill", "attention_softmax_decode"),
        *("attention_softmax_prefill", "attention_standard", "linear_w8a8_static", "scan_prefill"),
    }
)
MATRIX_RATES = frozenset({"bf16", "fp16", "fp8", "int8"})


@cache
def problems():
    """Every serving problem with work to count."""
    return [p for operator in KERNELS for p in problems_of(operator) if p.work is not None]


@cache
def records():
    found = []
    for problem in problems():
        work = problem.work
        peak = DEVICE.peak(work.rate) if work.rate in MATRIX_RATES else np.inf
        seconds = 1e-6 + SLOW * max(work.flops / peak, work.hbm_bytes / DEVICE.bandwidth)
        found.append(
            KernelRecord(
                operator=problem.operator,
                sizes=dict(problem.sizes),
                seconds=seconds,
                p10_s=seconds,
                p90_s=seconds,
                flops=work.flops,
                bytes=work.hbm_bytes,
                rate=work.rate,
            )
        )
    return tuple(found)


def groups():
    """(table's name, module, group, records of its rows)"""
    for table, numbers in kernel_tables(records(), HARDWARE.name):
        module = TABLE_MODULES[table.op]
        for group in module.groups(table, DEVICE):
            yield table.op, module, group, [problems()[numbers[row]] for row in group.rows]


def test_operators_that_multiply_have_a_table_and_no_other_has():
    multiplying = {p.operator for p in problems() if p.work.rate in MATRIX_RATES}
    assert multiplying - COMPARED == {p.operator for p in problems()} & set(TABLES)
    assert set(TABLES) <= set(KERNELS)
    small = {records()[number].operator for _, _, number in small_kernels(records())}
    assert small == {p.operator for p in problems()} - multiplying


def test_tables_are_read_by_the_module_of_their_kernels():
    for name, _ in TABLES.values():
        assert TABLE_MODULES[name] is MODULES[name]


def test_every_row_is_in_exactly_one_group():
    """A number format that no table knows is in none, and its measurements would be lost without a word."""
    grouped = [problem for _, _, _, rows in groups() for problem in rows]
    expected = [p for p in problems() if p.operator in TABLES]
    assert len(grouped) == len(expected)
    assert {id(p) for p in grouped} == {id(p) for p in expected}


def test_groups_are_one_number_format_as_the_cost_model_names_it():
    """The family of a calibration is found by the format's name, or the rate where the format has none."""
    for op, _, group, rows in groups():
        if op in ("gemm", "moe"):
            formats = {p.work.format or p.work.rate for p in rows}
            assert formats == {group.key.split("/")[1]}
        else:
            assert {f"hd{p.sizes['head_dim']}" for p in rows} == {group.key.split("/")[3]}


def test_sizes_are_those_that_the_cost_model_counts():
    """The columns say enough to count FLOPs again: multiply-adds of matrices, visible keys of queries."""
    for op, _, group, rows in groups():
        sizes = getattr(group.sizes, "problem", None)
        if op == "gemm":
            flops = 2 * sizes.m * sizes.n * sizes.k
        elif op == "moe":
            flops = 2 * sizes.assignments * (sizes.gates + 1) * sizes.width * sizes.inner
        else:
            continue
        ours = np.array([p.work.flops for p in rows])
        assert np.abs(flops / ours - 1).max() < 0.02, group.key  # biases and activations are counted beside
        counted = np.array([p.work.weight_bytes for p in rows])
        stored = sizes.weight_bytes * (
            sizes.n * sizes.k if op == "gemm" else sizes.distinct * flops / sizes.assignments / 2
        )
        assert np.abs(stored / counted - 1).max() < 0.02, group.key


def test_attention_counts_the_keys_and_products_that_the_cost_model_does():
    """A column that is missing reads as zero; products beside those of queries, keys and values are few."""
    for op, _, group, rows in groups():
        sizes = group.sizes
        if op == "generation_attention":
            heads = sizes.problem.heads
            length = np.where(heads.window > 0, np.minimum(sizes.length, heads.window), sizes.length)
            counted = sizes.problem.num_seqs * length * sizes.kv_token_bytes
            ours = np.array([p.work.kv_bytes for p in rows])
            assert (heads.num_heads == [p.sizes["num_heads"] for p in rows]).all()
        elif op == "context_attention":
            heads = sizes.heads
            window = np.where(heads.window > 0, heads.window, np.inf)
            short = np.clip(window - sizes.cached, 0, sizes.tokens)
            pairs = short * (sizes.cached + (short + 1) / 2)
            pairs += np.where(short < sizes.tokens, (sizes.tokens - short) * heads.window, 0)
            counted = 2 * sizes.count * heads.num_heads * heads.head_size * pairs
            ours = np.array([p.work.flops for p in rows])
            assert (heads.num_kv_heads == [p.sizes["num_key_value_heads"] for p in rows]).all()
        else:
            continue
        assert np.abs(ours / counted - 1).max() < 0.05, group.key


def test_times_are_predicted_from_every_group():
    """No form takes less than the memory needs for the weights that are read."""
    for _, module, group, rows in groups():
        if module is MOE:
            seconds = predict(group, GroupedExpertsFit())
            least = np.array([p.work.weight_bytes for p in rows]) / DEVICE.bandwidth
            assert (seconds >= least).all(), group.key
