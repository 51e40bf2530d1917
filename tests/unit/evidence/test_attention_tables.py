"""Attention and collective tables: sizes, kernels, rejected rows, and fits that find what made the rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.attention.decode import DecodeKernel, FlashDecodeFit, decode_seconds
from perfmodel.cost.kernel_models.attention.latent import LatentDecodeFit
from perfmodel.cost.kernel_models.attention.mixed import MixedAttentionFit
from perfmodel.cost.kernel_models.attention.prefill import FlashPrefillFit, PrefillKernel
from perfmodel.cost.kernel_models.messages.collective import CollectiveFit, CustomAllReduceFit
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.cost.kernel_models.registry import time_work
from perfmodel.errors import SpecError
from perfmodel.evidence.fit import attention, layer_profile
from perfmodel.evidence.fit.attention import DECODES, LATENT, PROMPTS
from perfmodel.evidence.fit.collectives import COLLECTIVES
from perfmodel.evidence.fit.kernels import predict
from perfmodel.evidence.fit.systems import MODULES
from perfmodel.evidence.sources.kernels import KernelTable, read_table
from perfmodel.ops.attention.decode import attention_decode as attention_decode_work
from perfmodel.ops.attention.prefill import Heads
from perfmodel.specs.scenario_file import load_hardware

A100, H100 = (DeviceFacts.of(load_hardware(name)) for name in ("a100-sxm-80gb", "h100-sxm-80gb"))
MEASURED = Path(__file__).resolve().parents[3] / "measurements" / "operators"


def grid(**axes):
    """All combinations of the axes, as columns."""
    mesh = np.meshgrid(*(np.array(axis) for axis in axes.values()), indexing="ij")
    return {name: column.ravel() for name, column in zip(axes, mesh, strict=True)}


def table(op, columns, **constant):
    count = len(next(iter(columns.values())))
    rest = {name: np.full(count, value) for name, value in constant.items()}
    return KernelTable("made_up", op, {"latency_ms": np.ones(count), **columns, **rest})


NAMES = {"engine_version": "vllm 1.0", "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
DECODE_SIZES = grid(
    batch_size=[1, 4, 16, 64, 256],
    num_heads=[8, 32],
    num_key_value_heads=[2, 8],
    head_dim=[128],
    step=[3, 63, 511, 4095, 16383],
    window_size=[0.0],
)
PROMPT_SIZES = grid(
    batch_size=[1, 4, 32],
    isl=[16, 128, 512, 2048, 8192],
    step=[0],
    num_heads=[4, 32],
    num_key_value_heads=[2, 4],
    head_dim=[128],
    window_size=[0.0],
)


def timed(module, rows, true, device):
    """The one group of a table whose times are those of the fit `true`."""
    (group,) = module.groups(rows, device)
    return replace(group, seconds=predict(group, true))


def error(group, fit):
    return np.max(np.abs(predict(group, fit) / group.seconds - 1))


def test_the_decode_fit_finds_what_made_the_rows():
    rows = table("generation_attention", DECODE_SIZES, kernel_source="vllm_flash_attn_fa3", **NAMES)
    values = {"launch_s": 7e-6, "memory_fraction": 0.9, "block_s": 3.5e-6, "doubling_s": 5e-7, "group_traffic": 0.03}
    true = FlashDecodeFit(kernel=DecodeKernel(split_share=1.1, window_overlap=128), **values)
    group = timed(DECODES, rows, true, H100)
    found = DECODES.fit([group])
    assert found.kernel == true.kernel
    assert error(group, found) < 0.03
    assert found.memory_fraction == pytest.approx(0.9, rel=0.05)
    assert found.launch_s == pytest.approx(7e-6, rel=0.3)
    assert found.residuals.num_rows == len(group.seconds)


def test_the_decode_fit_of_flashattention_2_knows_how_it_reads_windows():
    """Whole contexts are read once per KV head, windows once per query head: one fit has both."""
    sizes = grid(**{name: np.unique(column) for name, column in DECODE_SIZES.items()} | {"window_size": [0.0, 1024.0]})
    rows = table("generation_attention", sizes, kernel_source="vllm_flash_attn", **NAMES)
    kernel = DecodeKernel(splits_mha=False, is_balanced=False, window_overlap=128, window_unpacks=True)
    group = timed(DECODES, rows, FlashDecodeFit(kernel=kernel, memory_fraction=0.8, launch_s=6e-6), A100)
    assert (group.sizes.problem.heads.window > 0).any()
    found = DECODES.fit([group])
    assert found.kernel == kernel
    assert error(group, found) < 0.03


def test_the_prefill_fit_finds_what_made_the_rows():
    rows = table("context_attention", PROMPT_SIZES, kernel_source="vllm_flash_attn", **NAMES)
    values = {"tensor_fraction": 0.55, "memory_fraction": 0.7, "tail": 0.8, "launch_s": 9e-6}
    true = FlashPrefillFit(kernel=PrefillKernel(rows=64, keys=128, packs="single"), rate="bf16", **values)
    group = timed(PROMPTS, rows, true, A100)
    found = PROMPTS.fit([group])
    assert found.kernel == true.kernel
    assert error(group, found) < 0.03
    assert found.tensor_fraction == pytest.approx(0.55, rel=0.03)


@pytest.mark.parametrize(
    ("columns", "op", "dtype", "source", "true"),
    [
        (
            {"op_name": ["all_gather"]},
            "nccl",
            "nccl_dtype",
            "NCCL",
            CollectiveFit(launch_s=5e-6, hop_s=8e-7, simple_fraction=0.9, link_latency_s=0.6e-6, switch_ranks=8),
        ),
        (
            {"op_name": ["all_reduce"]},
            "custom_allreduce",
            "allreduce_dtype",
            "vLLM_custom_graph",
            CustomAllReduceFit(
                launch_s=4.5e-6,
                one_shot_fraction=0.4,
                beyond=CollectiveFit(switch_ranks=8, link_latency_s=0.6e-6),
                link_latency_s=0.6e-6,
            ),
        ),
    ],
)
def test_the_collective_fit_finds_what_made_the_rows(columns, op, dtype, source, true):
    rows = table(
        op,
        grid(num_gpus=[2, 4, 8], message_size=[2**n for n in range(8, 29)], **columns),
        kernel_source=source,
        engine_version="vllm 1.0",
        **{dtype: "half"},
    )
    rows = KernelTable(rows.system, rows.op, {**rows.columns, "latency_ms": np.full(len(rows), 1e3)})
    group = timed(COLLECTIVES, rows, true, H100)
    assert group.sizes.payload.max() == 2 * 2**28  # elements of two bytes
    found = COLLECTIVES.fit([group])
    assert error(group, found) < 0.03
    assert found.launch_s == pytest.approx(true.launch_s, rel=0.1)


def test_eager_rows_are_a_family_of_their_own():
    """They contain host time; serving must not find them under the name of the collective."""
    sizes = grid(num_gpus=[2, 8], message_size=[2**n for n in range(8, 20)], op_name=["all_reduce"])
    rows = table(
        "custom_allreduce", sizes, kernel_source="vLLM_custom_eager", engine_version="vllm 1.0", allreduce_dtype="half"
    )
    (group,) = COLLECTIVES.groups(rows, H100)
    assert group.key == "collective_eager/all_reduce"


def test_rows_that_beat_the_hardware_are_rejected():
    """8 sequences of 16k tokens hold 537 MB of KV: 263 us at the A100's peak bandwidth, whatever was measured."""
    shape = grid(
        batch_size=[8], num_heads=[32], num_key_value_heads=[8], head_dim=[128], step=[16383], window_size=[0.0]
    )
    for milliseconds, is_rejected in ((0.2, True), (0.3, False)):
        rows = table("generation_attention", shape, kernel_source="torch_flow", **NAMES)
        rows = KernelTable(rows.system, rows.op, {**rows.columns, "latency_ms": np.array([milliseconds])})
        assert list(attention.decodes_too_fast(rows, A100)) == [is_rejected]
        assert bool(DECODES.groups(rows, A100)) != is_rejected
    shape = grid(
        batch_size=[1], isl=[8192], step=[0], num_heads=[32], num_key_value_heads=[8], head_dim=[128], window_size=[0.0]
    )
    for milliseconds, is_rejected in ((1.7, True), (1.9, False)):  # 0.55 TFLOP: 1.76 ms
        rows = table("context_attention", shape, kernel_source="torch_flow", **NAMES)
        rows = KernelTable(rows.system, rows.op, {**rows.columns, "latency_ms": np.array([milliseconds])})
        assert list(attention.prefills_too_fast(rows, A100)) == [is_rejected]


def test_kernels_are_told_apart_by_library_group_and_device():
    shape = grid(
        batch_size=[1], num_heads=[8, 64], num_key_value_heads=[1, 8], head_dim=[128], step=[100], window_size=[0.0]
    )
    rows = table("generation_attention", shape, kernel_source="torch_flow", **NAMES)
    group = rows["num_heads"] / rows["num_key_value_heads"]
    assert list(attention.decode_kernels(rows, A100)) == ["mmha" if g in (1, 64) else "xqa" for g in group]
    rows = table("generation_attention", shape, kernel_source="flash_attention", **NAMES)
    assert set(attention.decode_kernels(rows, A100)) == {"flash3_sm80"}
    assert set(attention.decode_kernels(rows, H100)) == {"flash3"}


def test_wide_groups_have_a_kernel_of_their_own_where_newer_versions_decode_them_slowly():
    """64 query heads of one KV head on Blackwell: trtllm-gen until release candidate 10 of 1.3, another from 15 on."""
    columns = grid(batch_size=[1], num_heads=[64], num_key_value_heads=[1, 8], head_dim=[128], step=[100])
    shape = columns | {"window_size": np.zeros(2)}
    b200 = DeviceFacts.of(load_hardware("b200-sxm"))
    for version, first in (("trtllm 1.3.0rc10", "trtllm_gen"), ("trtllm 1.3.0rc15", "mmha_wide"), ("vllm 2.0", "")):
        names = NAMES | {"engine_version": version}
        rows = table("generation_attention", shape, kernel_source="torch_flow", **names)
        assert list(attention.decode_kernels(rows, b200)) == [first or "trtllm_gen", "trtllm_gen"]


def test_convolutions_of_older_tables_are_those_of_the_keys():
    """16 heads of keys, 16 or 64 of values, of 128: 2,048 channels there, or queries, keys and values, 6,144 or 12,288.
    Four bytes a token are moved for each, and TensorRT-LLM launches for each sequence."""
    columns = grid(batch_size=[4], seq_len=[1024], num_k_heads=[16], head_k_dim=[128], num_v_heads=[16, 64])
    columns |= {"num_tokens": np.full(2, 4096), "head_v_dim": np.full(2, 128)}
    names = {"op_name": "gdn", "kernel_source": "causal_conv1d_fn", "phase": "context"}
    for version, channels in (
        ("trtllm 1.3.0rc20", [2048, 2048]),
        ("sglang 0.5.10", [2048, 2048]),
        ("sglang 0.5.14", [6144, 12288]),
        ("unheard_of 1", [6144, 12288]),
    ):
        (group,) = MODULES["gdn"].groups(table("gdn", columns, engine_version=version, **names), H100)
        assert (group.sizes.activation_bytes / 4 / 4096).tolist() == channels, version
        assert group.sizes.launches.tolist() == [4, 4]
    names["kernel_source"] = "chunk_gated_delta_rule"
    (group,) = MODULES["gdn"].groups(table("gdn", columns, engine_version="trtllm 1.3.0rc20", **names), H100)
    assert group.sizes.launches.tolist() == [0, 0]


def test_profiles_fall_into_prompts_decodes_and_mixed_batches():
    columns = grid(
        prefill_chunk=[0.0, 64.0, 1024.0],
        kv_prefill=[0.0, 2048.0],
        n_decode=[0.0, 1.0, 32.0, 128.0],
        kv_decode=[256.0, 4096.0],
    )
    columns["time_us"] = np.ones(len(columns["n_decode"]))
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "kv_cache_dtype": "bfloat16"}
    profile = table("attention", columns, **heads)
    decode, prompt, mixed = layer_profile.attention_groups([profile], A100)
    assert np.all(prompt.sizes.tokens > 0)
    assert np.all(mixed.sizes.tokens > 0)
    assert len(decode.seconds) == np.sum(columns["prefill_chunk"] == 0)
    true = MixedAttentionFit(rate="bf16", softmax_ops=38.0, tensor_fraction=0.8, reread=1.0, domain={"head_dim": 128})
    mixed = replace(mixed, seconds=predict(mixed, true))
    assert error(mixed, layer_profile.fit_attention(mixed)) < 0.05


def test_two_cards_tell_the_softmax_from_products(monkeypatch):
    """The committed profiles of two cards leave less unexplained with the committed count than with a fifth more or
    less; one card says nothing."""
    committed = load_overheads().softmax_ops
    tried = tuple(round(share * committed) for share in (0.8, 1.0, 1.2))
    monkeypatch.setattr(layer_profile, "_SOFTMAX_OPS", tried)
    cards = layer_profile.read_cards(MEASURED.parent / "per-request")
    assert layer_profile.fit_softmax(cards) == committed
    with pytest.raises(SpecError, match="got 1 layer profiles"):
        layer_profile.fit_softmax(cards[:1])


@pytest.mark.parametrize(
    ("module", "op", "median", "p90"),
    [
        (PROMPTS, "context_attention", 0.06, 0.20),
        (DECODES, "generation_attention", 0.08, 0.25),
        (COLLECTIVES, "nccl", 0.07, 0.20),
    ],
)
def test_half_of_the_rows_predict_the_other_half(module, op, median, p90):
    rows = read_table(MEASURED / "a100_sxm" / f"{op}.csv.gz")
    errors = []
    for group in module.groups(rows, A100):
        is_kept = np.random.default_rng(0).random(len(group.seconds)) < 0.5
        kept, rest = group.take(is_kept), group.take(~is_kept)
        errors.append(np.abs(predict(rest, module.fit([kept])) / rest.seconds - 1))
    joined = np.concatenate(errors)
    assert np.median(joined) < median
    assert np.quantile(joined, 0.9) < p90 + 0.02


def test_decode_sizes_read_windows_and_formats():
    shape = grid(
        batch_size=[2], num_heads=[16], num_key_value_heads=[4], head_dim=[64], step=[999], window_size=[128.0]
    )
    names = {**NAMES, "kv_cache_dtype": "fp8"}
    sizes = attention.decode_sizes(table("generation_attention", shape, kernel_source="vllm_flash_attn_fa3", **names))
    assert (sizes.length[0], sizes.problem.heads.window[0], sizes.kv_token_bytes[0]) == (1000, 128, 2 * 4 * 64)
    assert float(decode_seconds(sizes, FlashDecodeFit(), H100).memory[0]) < 1e-6
    assert FlashPrefillFit().residuals.num_rows == 0


def test_the_latent_fit_finds_what_made_the_rows():
    """Whole modules; as the fit of an operator it times the attention inside, with no floor and no projections."""
    shape = grid(batch_size=[1, 8, 64, 512], num_heads=[16, 128], step=[63, 1023, 8191])
    rows = table(
        "mla_generation_module",
        shape,
        kernel_source="FLASHMLA",
        engine_version="vllm 1.0",
        kv_cache_dtype="bfloat16",
        gemm_type="bfloat16",
    )
    true = LatentDecodeFit(
        kernel=DecodeKernel(heads_per_block=64, rows=64), memory_fraction=0.85, tensor_fraction=0.6, launch_s=7e-5
    )
    group = timed(LATENT, rows, true, H100)
    found = LATENT.fit([group])
    assert error(group, found) < 0.05
    work = attention_decode_work(64, 64 * 4096, Heads(16, 1, 576, 512, "bf16", 2, 2))
    assert time_work(work, found, H100).duration_s < 0.5 * float(np.max(group.seconds))
    assert found.domain.distance(work.problem.traits) == 0
