"""GEMM and mixture-of-experts tables: groups, sizes, rejected rows, and fits that find what made the rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.experts import GroupedExpertsFit
from perfmodel.cost.kernel_models.fits import Domain, take
from perfmodel.cost.kernel_models.gemm import TiledGemmFit
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.kernels import predict
from perfmodel.evidence.fit.products import (
    GEMM,
    MOE,
    _filled,
    _in_turn,
    experts_too_fast,
    gemms_too_fast,
    rank_load,
)
from perfmodel.evidence.fit.systems import _fit_to_others, _fit_versions, _Fitted, _named, key_of
from perfmodel.evidence.kinds.operators import _roofline
from perfmodel.evidence.sources.kernels import WEIGHT_FORMATS, KernelTable, read_table, version_order
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.feedforward import experts
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm as gemm_work
from perfmodel.ops.problem_sizes import KernelTraits
from perfmodel.ops.routing import ExpertLoad
from perfmodel.specs import load_hardware

H100, H200 = (DeviceFacts.of(load_hardware(name)) for name in ("h100-sxm-80gb", "h200-sxm"))
MEASURED = Path(__file__).resolve().parents[3] / "measurements" / "operators"


def table(op, columns, **constant):
    count = len(next(iter(columns.values())))
    rest = {name: np.full(count, value) for name, value in constant.items()}
    return KernelTable("made_up", op, {"latency_ms": np.ones(count), **columns, **rest})


def grid(**axes):
    mesh = np.meshgrid(*(np.array(axis) for axis in axes.values()), indexing="ij")
    return {name: column.ravel() for name, column in zip(axes, mesh, strict=True)}


def gemms(dtype="bfloat16", version="vllm 1.0", source="linear"):
    sizes = grid(m=[1, 8, 64, 200, 512, 1500, 4096, 16384], n=[256, 1024, 4096, 14336], k=[256, 1024, 4096, 14336])
    return table("gemm", sizes, gemm_dtype=dtype, engine_version=version, kernel_source=source)


def mixtures(dtype="bfloat16", version="trtllm 1.0", source="cutlass", distribution="power_law_1.2"):
    sizes = grid(
        num_tokens=[1, 8, 64, 512, 4096, 16384],
        hidden_size=[2048, 7168],
        inter_size=[768, 2048],
        topk=[2, 8],
        num_experts=[64],
        moe_tp_size=[1],
        moe_ep_size=[1, 8],
    )
    names = {"moe_dtype": dtype, "engine_version": version, "kernel_source": source, "distribution": distribution}
    return table("moe", sizes, **names)


def timed(module, rows, true, device=H100):
    (group,) = module.groups(rows, device)
    return replace(group, seconds=predict(group, true))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_gemm_fit_finds_what_made_the_rows(dtype):
    true = TiledGemmFit(
        launch_s=3e-6, compute_fraction=0.75, memory_fraction=0.7, feed_edge=60, knee=3.0, tile_s=1.5e-6, split_s=3e-6
    )
    group = timed(GEMM, gemms(dtype, "trtllm 1.0"), true)
    found = GEMM.fit([group])
    for name in ("launch_s", "compute_fraction", "memory_fraction", "knee", "tile_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15), name
    assert found.residuals.num_rows == len(group.seconds)
    assert max(abs(found.residuals.p10), abs(found.residuals.p90)) < 0.02


def test_two_devices_of_an_architecture_are_fitted_together():
    """They differ by what they declare (3.35 and 4.8 TB/s), so one fit predicts both, and one device the other."""
    true = TiledGemmFit(launch_s=4e-6, compute_fraction=0.7, memory_fraction=0.75, knee=3.0, cache_speedup=2.5)
    groups = [timed(GEMM, gemms("fp8", "trtllm 1.0"), true, device) for device in (H100, H200)]
    assert not np.allclose(groups[0].seconds, groups[1].seconds, rtol=0.2)
    found = GEMM.fit(groups)
    for name in ("launch_s", "compute_fraction", "memory_fraction", "knee", "cache_speedup"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1), name
    assert found.residuals.num_rows == sum(len(group.seconds) for group in groups)
    for group in groups:
        assert np.abs(predict(group, found) / group.seconds - 1).max() < 0.03
    assert np.abs(predict(groups[1], GEMM.fit(groups[:1])) / groups[1].seconds - 1).max() < 0.1


def test_the_prior_errs_as_on_an_architecture_that_it_was_not_fitted_to():
    """Kernels that leave 0.8 and 0.4 of both peaks: together they seem to leave 0.57, a factor of 1.4 from either, but
    each alone is wrong about the other by 2."""
    a100 = DeviceFacts.of(load_hardware("a100-sxm-80gb"))
    true = TiledGemmFit(launch_s=1e-6, compute_fraction=0.8, memory_fraction=0.8)
    slower = true.model_copy(update={"launch_s": 2e-6, "compute_fraction": 0.4, "memory_fraction": 0.4})
    groups = [timed(GEMM, gemms("bfloat16"), fit, device) for fit, device in ((true, a100), (slower, H100))]
    prior, num_rows = _fit_to_others("gemm", groups)
    assert num_rows == sum(len(group.rows) for group in groups)
    assert prior.residuals.p10 < -0.6
    assert prior.residuals.p90 > 0.6


def test_versions_sort_by_their_numbers():
    versions = ["1.3.0rc20", "1.10.0", "1.2.9", "1.3.0rc15"]
    assert sorted(versions, key=version_order) == ["1.2.9", "1.3.0rc15", "1.3.0rc20", "1.10.0"]


def test_a_version_that_runs_otherwise_has_a_fit_of_its_own_and_versions_that_agree_share_one():
    """1.2.9 takes 1.5 times as long for everything; 1.2.8, of two rows, is too small to tell."""
    group = timed(GEMM, gemms("bfloat16", "trtllm 1.3.0rc20"), TiledGemmFit())
    older = replace(group, version="1.2.9", seconds=1.5 * group.seconds)
    few = replace(older, version="1.2.8").take(np.arange(2))
    groups = [older, few, replace(group, version="1.3.0rc15"), group]
    new, old = _fit_versions("gemm", groups)
    assert (new.versions, new.num_rows) == (("1.3.0rc20", "1.3.0rc15", "1.2.8"), 2 * len(group.rows) + 2)
    assert (old.versions, old.num_rows) == (("1.2.9",), len(group.rows))
    for fitted, rows in ((new, group), (old, older)):
        assert fitted.key == "gemm/bf16"
        assert fitted.fit.residuals.num_rows == fitted.num_rows
        assert np.median(np.abs(predict(rows, fitted.fit) / rows.seconds - 1)) < 0.05


def test_a_version_and_a_kernel_find_their_own_fit_else_that_of_the_default_kernel():
    """Of an engine's kernels for a format one is the default, under the format's name; others name themselves and the
    versions that they were fitted to."""
    fit, key = TiledGemmFit(), "moe/bf16/triton"
    calibration = Calibration(
        device="d",
        engine="vllm",
        families=dict.fromkeys(("moe/bf16", "moe/bf16/nongated", "gemm/fp8", "gemm/fp8/static"), fit),
        others=dict.fromkeys((f"{key}/0.14.0,0.13.1", "moe/bf16/cutlass/0.19.0"), fit),
        versions={"moe/bf16": "0.19.0,0.12.0"},
    )
    (group,) = MOE.groups(mixtures("bfloat16", "vllm 0.14.0", "vllm_fused_moe"), H100)
    assert (group.key, group.version) == (key, "0.14.0")
    for version, name, expected in (
        ("0.14.0", key, f"{key}/0.14.0,0.13.1"),
        ("0.13.1", key, f"{key}/0.14.0,0.13.1"),
        ("0.19.0", key, "moe/bf16"),
        ("0.12.0", key, "moe/bf16"),  # older than another fit of the kernel, and yet the default's
        ("0.13.0", key, f"{key}/0.14.0,0.13.1"),
        ("0.19.0", "moe/bf16/cutlass", "moe/bf16/cutlass/0.19.0"),
        ("0.19.0", "moe/bf16/nongated", "moe/bf16/nongated"),
        ("0.19.0", "gemm/int8/static", "gemm/fp8/static"),  # the most parts in common
        ("0.19.0", "attention_decode/bf16", None),
    ):
        assert key_of(replace(group, version=version, key=name), calibration) == expected, (version, name)


def test_servers_run_the_kernel_that_their_engine_names_whatever_tables_time_most():
    """Both kernels time NVFP4 experts of any size; the format's name goes to one of them."""
    cutlass, gen = (GroupedExpertsFit(launch_s=seconds) for seconds in (5e-5, 2e-5))
    fits = [
        _Fitted("moe/nvfp4/cutlass", ("1.3.0",), cutlass.model_copy(update={"domain": Domain(gates=2)}), 900),
        _Fitted("moe/nvfp4/min_latency", ("1.3.0",), gen, 100),
    ]
    for preferred, default, other in (
        ({}, "cutlass", "min_latency"),
        ({"moe/nvfp4": "min_latency"}, "min_latency", "cutlass"),
    ):
        families = _named(fits, preferred)["families"]
        by_key = {fit.key: fit.fit for fit in fits}
        assert families["moe/nvfp4"] is by_key[f"moe/nvfp4/{default}"]
        assert families[f"moe/nvfp4/{other}"] is by_key[f"moe/nvfp4/{other}"]
        calibration = Calibration(device="d", engine="trtllm", families=families)
        assert calibration.fit("moe", "fp4", KernelTraits(gates=2), "nvfp4") is by_key[f"moe/nvfp4/{default}"]


def test_samples_have_some_rows_of_every_kernel_and_always_the_same():
    rows = KernelTable("made_up", "gemm", {**gemms().columns, "gemm_dtype": np.array(["fp8"] * 120 + ["bfloat16"] * 8)})
    sample = rows.sampled(10)
    assert [len(members) for _, members in sample.groups(("gemm_dtype",))] == [8, 10]
    assert all(np.array_equal(sample[name], rows.sampled(10)[name]) for name in rows.columns)
    assert len(rows.sampled(1000)) == len(rows)


def test_an_expert_fit_finds_what_made_the_rows():
    true = GroupedExpertsFit(launch_s=3e-5, compute_fraction=0.7, memory_fraction=0.8, passes=2.0, knee=2.0)
    group = timed(MOE, mixtures(), true)
    found = MOE.fit([group])
    for name in ("launch_s", "memory_fraction", "passes"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15), name
    assert max(abs(found.residuals.p10), abs(found.residuals.p90)) < 0.03


def test_rows_that_beat_the_hardware_are_not_fitted():
    """A third of the rows whose operands L2 cannot hold (weights of 100 MB and more, of 50) is a thousand times as
    fast."""
    kinds = (
        (GEMM, gemms_too_fast, gemms(), TiledGemmFit()),
        (MOE, experts_too_fast, mixtures(), GroupedExpertsFit()),
    )
    for module, is_too_fast, rows, true in kinds:
        group = timed(module, rows, true)
        assert not is_too_fast(group).any()
        seconds, is_large = group.seconds.copy(), weight_bytes(group) > 2 * H100.l2_bytes
        expected = is_large & (np.cumsum(is_large) % 3 == 0)
        assert expected.sum() >= 8
        seconds[expected] /= 1000
        spoiled = replace(group, seconds=seconds)
        assert (is_too_fast(spoiled) == expected).all()
        fit = module.fit([spoiled])
        assert fit.residuals.num_rows == (~expected).sum()
        assert np.median(np.abs(predict(group, fit) / group.seconds - 1)) < 0.1


def weight_bytes(group):
    """Of the weights that each row reads."""
    problem = group.sizes.problem
    if hasattr(problem, "k"):
        return problem.n * problem.k * problem.weight_bytes
    return problem.distinct * (problem.gates + 1) * problem.width * problem.inner * problem.weight_bytes


def test_what_l2_holds_may_be_faster_than_memory_but_not_than_the_tensor_cores():
    """One row by 4096 x 4096 in bf16 is 33.6 MB, 10.0 us at 3.35 TB/s: at 5 us it came from the 50 MB of L2. 14336 x
    14336 is 411 MB, which did not. 16384 rows are 0.55 PFLOP at 989 TFLOP/s, whatever holds the weights."""
    columns = {"m": np.array([1, 1, 16384, 16384]), "n": np.array([4096, 14336, 4096, 4096])}
    columns |= {"k": columns["n"], "latency_ms": np.array([0.005, 0.061, 0.55, 0.56])}
    names = {"gemm_dtype": "bfloat16", "engine_version": "vllm 1.0", "kernel_source": "linear"}
    (group,) = GEMM.groups(table("gemm", columns, **names), H100)
    assert gemms_too_fast(group).tolist() == [False, True, True, False]


def test_kernels_of_an_engine_are_told_apart():
    names = [
        ("trtllm 1", "", "fp8"),
        ("vllm 1", "DeepGemmFp8BlockScaledMMKernel", "fp8_block"),
        ("vllm 1", "FlashInferFp8BlockScaledMMKernel", "fp8_block"),
    ]
    keys = [GEMM.groups(gemms(dtype, version, source), H100)[0].key for version, source, dtype in names]
    assert keys == ["gemm/fp8", "gemm/fp8_block", "gemm/fp8_block/flashinfer"]
    assert GEMM.groups(gemms("unheard_of"), H100) == []


def test_experts_that_all_beat_the_memory_are_refused_in_a_sentence():
    """A nanosecond a call: weights of one expert alone take a thousand times as long to read."""
    rows = mixtures()
    impossible = replace(rows, columns={**rows.columns, "latency_ms": np.full(len(rows.seconds), 1e-6)})
    (group,) = MOE.groups(impossible, H100)
    with pytest.raises(SpecError, match=r"all \d+ rows beat the declared peaks of the device"):
        MOE.fit([group])


def test_the_sizes_of_a_row_are_those_of_its_operator():
    (group,) = GEMM.groups(gemms("fp8"), H100)
    form = LinearFormat("fp8", 1.0, 1.0, 2.0, True)
    for row in (0, 50, 100):
        sizes = take(group.sizes, np.array([row]))
        m, n, k = (float(number[0]) for number in sizes.problem[:3])
        work = gemm_work("x", m, int(n), int(k), form)
        assert numbers(sizes.problem) == pytest.approx(numbers(work.problem))
        assert sizes.moved_bytes[0] + sizes.problem.quantized_bytes[0] == pytest.approx(work.hbm_bytes)
    (group,) = MOE.groups(mixtures(), H100)
    for row in (0, 17, 60):
        sizes = take(group.sizes, np.array([row]))
        problem = sizes.problem
        load = ExpertLoad(problem.distinct[0], problem.assignments[0], tuple(problem.tiles[0]))
        ffn = MoEFFN(int(problem.num_experts[0]), int(problem.top_k[0]), int(problem.inner[0]))
        local, width = int(problem.local_experts[0]), int(problem.width[0])
        shape = {"width": width, "intermediate": ffn.intermediate_size, "local_experts": local}
        work = experts(int(problem.tokens[0]), ffn, load, LinearFormat("bf16", 2.0, 2.0, 2.0), **shape)
        assert numbers(problem) == pytest.approx(numbers(work.problem))
        moved = problem.assignments[0] * sizes.row_bytes[0] + problem.sum_bytes[0]
        assert moved == pytest.approx(work.activation_bytes)


def numbers(problem):
    """All of its numbers, those of a column too, one after the other."""
    return np.concatenate([np.ravel(value) for value in problem])


def test_eager_floors_are_fitted_beside_the_kernel_not_into_it():
    true = TiledGemmFit(launch_s=4e-6, eager_launch_s=2e-5, eager_floor_s=9e-5, quantize_row_s=1e-9)
    group = timed(GEMM, gemms("fp8_block", "vllm 1", "DeepGemm"), true)
    found = GEMM.fit([group])
    assert found.eager_floor_s == pytest.approx(9e-5, rel=0.02)
    assert found.launch_s == 4e-6


def test_what_tables_pack_in_every_call_serving_packs_once():
    """SGLang's blockwise FP8 on Blackwell: 14 us of a launch in its tables, of which serving has 4; on Hopper, whose
    kernel reads the scales as they are, what tables time is what serving has."""
    b200 = DeviceFacts.of(load_hardware("b200-sxm"))
    for device, launch_s in ((b200, 4e-6), (H100, 14e-6)):
        rows = gemms("fp8_block", "sglang 1", "sglang_deepgemm")
        group = timed(GEMM, rows, TiledGemmFit(launch_s=14e-6, quantize_row_s=1e-9), device)
        fit = GEMM.fit([group])
        assert fit.launch_s == pytest.approx(launch_s, rel=0.05)
        assert np.median(np.abs(predict(group, fit) / group.seconds - 1)) < 0.03


def test_balanced_loads_by_hand():
    """8 tokens, 4 experts, 2 each: slots (i, i + 2) mod 4; 4 tokens per expert; on 2 ranks every token visits both."""
    whole, half = rank_load(8, 4, 2, 1, "balanced"), rank_load(8, 4, 2, 2, "balanced")
    assert (whole.distinct, whole.assignments, whole.tokens, whole.tiles[0]) == (4, 16, 8, 4)
    assert (half.distinct, half.assignments, half.tokens) == (2, 8, 8)


@pytest.mark.parametrize("tokens", [1, 4, 100, 3000])
@pytest.mark.parametrize("name", ["balanced", "power_law_1.01", "power_law_1.2"])
def test_loads_conserve_tokens(tokens, name):
    whole, rank = rank_load(tokens, 64, 8, 1, name), rank_load(tokens, 64, 8, 8, name)
    assert whole.assignments == tokens * 8
    assert tokens * 8 / 8 <= rank.assignments * 1.01 + 1
    assert rank.distinct <= 8
    assert list(rank.tiles) == sorted(rank.tiles, reverse=True)
    assert rank_load(tokens, 64, 8, 8, name) == rank


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 40))
def test_leftover_slots_go_one_at_a_time_to_the_smallest_expert(heights, amount):
    one_at_a_time = list(heights)
    for _ in range(amount):
        one_at_a_time[one_at_a_time.index(min(one_at_a_time))] += 1
    assert _filled(np.array(heights), amount).tolist() == one_at_a_time


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 30))
def test_ranks_with_room_take_turns(room, amount):
    shares, left = [0] * len(room), amount
    while left and shares != room:
        for rank, most in enumerate(room):
            if left and shares[rank] < most:
                shares[rank], left = shares[rank] + 1, left - 1
    assert _in_turn(amount, np.array(room)).tolist() == shares


def test_every_format_reads_as_many_bytes_as_it_says():
    assert WEIGHT_FORMATS["fp8"].quantized_bytes == 3
    assert WEIGHT_FORMATS["bfloat16"].quantized_bytes == 0


def test_a_calibration_picks_the_kernel_of_a_work():
    families = {
        "gemm/bf16": TiledGemmFit(),
        "gemm/int4_wo": TiledGemmFit(feed_edge=126),
        "moe/fp8_block": GroupedExpertsFit(domain=Domain(expert_parallel=True)),
        "moe/fp8_block/triton": GroupedExpertsFit(domain=Domain(expert_parallel=False)),
    }
    calibration = Calibration(device="d", engine="vllm", families=families)
    assert calibration.fit("gemm", "bf16", None, "int4_wo") is families["gemm/int4_wo"]
    assert calibration.fit("gemm", "bf16", None, "nf4_wo") is families["gemm/bf16"]
    shared = KernelTraits(gates=2, shares_experts=True)
    assert calibration.fit("moe", "fp8", shared, "fp8_block") is families["moe/fp8_block"]
    alone = shared._replace(shares_experts=False)
    assert calibration.fit("moe", "fp8", alone, "fp8_block") is families["moe/fp8_block/triton"]


@pytest.mark.release
@pytest.mark.parametrize(
    ("op", "module", "engine", "key", "median", "p90"),
    [
        ("gemm", GEMM, "vllm", "gemm/bf16", 0.065, 0.2),
        ("gemm", GEMM, "trtllm", "gemm/fp8", 0.04, 0.15),
        ("moe", MOE, "trtllm", "moe/fp8_block/cutlass", 0.07, 0.22),
    ],
)
def test_other_shapes_of_measured_kernels(op, module, engine, key, median, p90):
    """Fitted on half of the (N, K) pairs, or of the (width, inner size) pairs; judged on the others."""
    rows = read_table(MEASURED / "h100_sxm" / f"{op}.csv.gz")
    dtype = {"gemm/bf16": "bfloat16", "gemm/fp8": "fp8", "moe/fp8_block/cutlass": "fp8_block"}[key]
    mine = np.char.startswith(rows["engine_version"].astype(str), engine) & (rows[f"{op}_dtype"] == dtype)
    (group,) = (group for group in module.groups(rows.take(mine), H100) if group.key == key)
    first, second = ("n", "k") if op == "gemm" else ("width", "inner")
    pair = getattr(group.sizes.problem, first) * 1e6 + getattr(group.sizes.problem, second)
    is_fitted = np.isin(pair, np.unique(pair)[::2])

    fit = module.fit([group.take(is_fitted)])
    aside = group.take(~is_fitted)
    error = np.abs(predict(aside, fit) / aside.seconds - 1)
    assert np.median(error) < median
    assert np.quantile(error, 0.9) < p90


def test_declared_peaks_alone_by_hand() -> None:
    """One row reads n k weights of 2 bytes at the bandwidth; 8,192 rows multiply 2 m n k at the peak, in tiles."""
    columns = {"m": np.array([1, 8192]), "n": np.array([8192, 8192]), "k": np.array([8192, 8192])}
    (group,) = GEMM.groups(
        table("gemm", columns, gemm_dtype="bfloat16", engine_version="vllm 0.19.0", kernel_source="x"), H100
    )
    few, many = _roofline(group, TiledGemmFit(compute_fraction=0.5, memory_fraction=0.5))
    assert few == pytest.approx(2 * 8192 * 8192 / H100.bandwidth, rel=0.02)
    peak = H100.hardware.declared.peak_flops_per_s["bf16"]
    assert 1.0 <= many / (2 * 8192**3 / peak) < 1.1
