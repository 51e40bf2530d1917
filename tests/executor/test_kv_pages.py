"""Quantised pages: what storing costs in accuracy, by the definition of each format; and trees of drafted tokens."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from dataclasses import replace  # noqa: E402

from executor_models import MODELS  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.changes import with_window  # noqa: E402
from perfmodel.models.model_changes import ModelChanges  # noqa: E402
from perfmodel.models.number_formats import kv_element_bytes  # noqa: E402
from perfmodel.ops.formats import served_model  # noqa: E402
from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.attention_prefill import AttentionRule  # noqa: E402
from perfmodel_executors.kernels.kv_pages import FP8, FP8_MAX, Chunks, Packing, empty_pages  # noqa: E402
from perfmodel_executors.kernels.rope_kv_write import rope_table  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402

BLOCK = 4
QUANTIZED = (FP8, torch.int8)


def stored(x_TKH, dtype):
    """x after a trip through pages of `dtype`."""
    num_tokens, heads, dim = x_TKH.shape
    num_blocks = -(-num_tokens // BLOCK)
    pages = empty_pages(num_blocks, BLOCK, heads, (dim, dim), dtype)
    load_kernels().kv_write(x_TKH, 2 * x_TKH, pages, torch.arange(num_tokens))
    k, v = pages.gathered(torch.arange(num_blocks), torch.float32)
    return k[:num_tokens], v[:num_tokens] / 2


def test_int8_keeps_every_element_within_half_a_step_of_its_tokens_scale():
    x = torch.randn(37, 3, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 37)[:, None, None]
    x[5] = 0
    half_step = x.abs().amax(-1, keepdim=True) / 127 / 2
    for read in stored(x, torch.int8):
        assert ((read - x).abs() <= half_step * 1.0001 + 1e-30).all()


def test_fp8_keeps_three_bits_of_mantissa_and_saturates():
    """e4m3: relative error 2^-4 for normal numbers (from 2^-6), absolute 2^-10 below, 448 at most."""
    x = torch.randn(64, 2, 32, generator=torch.Generator().manual_seed(0)).mul(4).exp()[..., :16]
    (k, _), bound = stored(x, FP8), torch.maximum(x / 16, torch.tensor(2.0**-10))
    inside = x <= FP8_MAX
    assert ((k - x).abs() <= bound)[inside].all()
    assert (k[~inside] == FP8_MAX).all()
    assert (~inside).any()


@pytest.mark.parametrize("dtype", [torch.float32, *QUANTIZED])
@pytest.mark.parametrize("has_rope", [True, False])
def test_the_fused_write_is_rope_then_write(dtype, has_rope):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, n, 8, generator=generator) for n in (4, 2, 2))
    table = rope_table(5, 8, 10_000.0, torch.float32) if has_rope else None
    kernels, slots = load_kernels(), torch.tensor([3, 9, 0, 4, 6])
    fused, apart = (empty_pages(3, BLOCK, 2, (8, 8), dtype) for _ in range(2))
    rotated = kernels.rope_kv_write(q, k, v, table, fused, slots)
    kernels.kv_write(kernels.rope(k, table) if has_rope else k, v, apart, slots)
    assert torch.equal(rotated, kernels.rope(q, table) if has_rope else q)
    for one, other in zip(fused, apart, strict=True):
        assert one is other or torch.equal(one.double(), other.double())


@pytest.mark.parametrize(("name", "largest"), [("fp8", 0.25), ("fp8_e4m3", 0.25), ("int8", 0.05)])
def test_a_decoder_with_quantised_keys_and_values_says_nearly_the_same(name, largest):
    """Logits of random weights have variance 1; chunked and decoded steps read what earlier ones have written."""
    served = served_model(MODELS["gqa"], EngineSpec(kv_cache_dtype=name))
    exact, rough = (Decoder(model, torch.float32, seed=1) for model in (MODELS["gqa"], served))
    tokens, table = list(range(3, 24)), [4, 0, 5, 2, 1, 3]
    logits = []
    for decoder in (exact, rough):
        cache, done = decoder.new_cache(BLOCK, 6), 0
        for size in (9, 1, 10, 1):
            segment = TokenSegment(tokens[done : done + size], done, table)
            out = decoder.forward(build_batch([segment], BLOCK), cache)
            done += size
        logits.append(out)
    assert cache.pages[0].dtype in QUANTIZED
    difference = (logits[0] - logits[1]).abs().max()
    assert 0 < difference < largest


@pytest.mark.parametrize(("bits", "group_size"), [(8, 16), (4, 8), (4, 32), (2, 8)])
def test_packed_elements_are_within_half_a_step_of_their_group(bits, group_size):
    """Whatever the offset: a step is the group's problem in 2^bits - 1 parts, its ends rounded to fp16."""
    packing = Packing(bits, group_size)
    x = (
        torch.randn(21, 3, 32, generator=torch.Generator().manual_seed(0)) * 3
        + torch.linspace(-50, 50, 21)[:, None, None]
    )
    x[5] = 1.25
    pages = empty_pages(6, BLOCK, 3, (32, 32), torch.float32, packing=packing)
    load_kernels().kv_write(x, -x, pages, torch.arange(21))
    groups = x.unflatten(-1, (-1, group_size))
    problem = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(group_size, -1)
    most = problem / (2**bits - 1) * (0.5 + 2.0**-10) + (x.abs() + problem) * 2.0**-10
    for read, written in zip(pages.gathered(torch.arange(6), torch.float32), (x, -x), strict=True):
        assert ((read[:21] - written).abs() <= most).all()
    assert pages.v_dim == 32
    assert pages.block_bytes == 2 * BLOCK * 3 * 32 * kv_element_bytes(f"int{bits}", group_size)


def test_packed_slots_move_and_pages_grow_with_what_they_hold():
    pages = empty_pages(2, BLOCK, 2, (16, 8), torch.float32, packing=Packing(2, 8))
    pages.fill_normal(0)
    before = [part.clone() for part in pages.gathered(torch.arange(2), torch.float32)]
    assert all(part.unique().numel() > 3 for part in before)
    pages = pages.grown(3)
    pages.move(torch.tensor([0, 5]), torch.tensor([8, 0]))
    for old, new in zip(before, pages.gathered(torch.arange(3), torch.float32), strict=True):
        assert torch.equal(new[8], old[0])
        assert torch.equal(new[0], old[5])
        assert torch.equal(new[1:8], old[1:8])


@pytest.mark.parametrize(("bits", "largest"), [(8, 0.02), (4, 0.4), (2, 2.5)])
def test_a_decoder_with_packed_keys_and_values_says_nearly_the_same(bits, largest):
    """Chunked, decoded and shared by a plain model's weights; fewer bits are further off."""
    served = served_model(MODELS["gqa"], EngineSpec(kv_cache_dtype=f"int{bits}", kv_cache_group_size=8))
    exact, rough = (Decoder(model, torch.float32, seed=1) for model in (MODELS["gqa"], served))
    outputs = []
    for decoder in (exact, rough):
        cache, done = decoder.new_cache(BLOCK, 6), 0
        for size in (9, 1, 10, 1):
            segment = TokenSegment(list(range(3 + done, 3 + done + size)), done, [4, 0, 5, 2, 1, 3])
            out = decoder.forward(build_batch([segment], BLOCK), cache)
            done += size
        outputs.append(out)
    assert cache.pages[0].packing == Packing(bits, 8)
    assert largest / 100 < (outputs[0] - outputs[1]).abs().max() < largest


@pytest.mark.parametrize(
    ("changes", "engine", "sentence"),
    [
        ({}, {"kv_cache_group_size": 16}, "heads of 8 are not whole groups of 16; set engine.kv_cache_group_size"),
        ({"window": 9}, {"kv_cache_group_size": 8}, r"a rolling KV cache .* with scales in groups is not executed"),
        (
            {"window": 9},
            {"kv_cache_group_size": 8, "kv_cache_residual_tokens": 8},
            "a KV cache in several precisions is executed for attention over all keys",
        ),
    ],
)
def test_packed_caches_that_are_not_executed_are_refused(changes, engine, sentence):
    model = with_window(MODELS["gqa"], ModelChanges(**changes)) if changes else MODELS["gqa"]
    with pytest.raises(PerfmodelError, match=sentence):
        Decoder(served_model(model, EngineSpec(kv_cache_dtype="int4", **engine)))


def test_a_cache_in_a_format_without_pages_is_refused():
    model = MODELS["gqa"]
    model = replace(model, quantization=replace(model.quantization, kv_cache="nvfp4"))
    with pytest.raises(PerfmodelError, match="KV cache in nvfp4 is not executed yet; set kv_cache_dtype to auto"):
        Decoder(model)


def _attend_chunk(q, k, v, prefix, ancestors=None, **spans):
    num_tokens = len(k)
    pages = empty_pages(num_tokens // BLOCK + 1, BLOCK, k.shape[1], (k.shape[2], v.shape[2]), torch.float32)
    kernels, table = load_kernels(), torch.arange(num_tokens // BLOCK + 1)[None]
    kernels.kv_write(k, v, pages, torch.arange(num_tokens))
    return kernels.attention_prefill(
        q, pages, Chunks(table, torch.tensor([0, len(q)]), torch.tensor([prefix]), ancestors), AttentionRule(**spans)
    )


def test_each_path_of_a_tree_attends_as_if_it_were_alone():
    """Nodes 0 - 1 - 3 and 0 - 2 - 4, 2 - 5: the rows of a path are those of a chunk with that path's tokens only."""
    generator, prefix = torch.Generator().manual_seed(0), 6
    q = torch.randn(6, 4, 8, generator=generator)
    k, v = (torch.randn(prefix + 6, 2, 8, generator=generator) for _ in range(2))
    parents = {0: None, 1: 0, 2: 0, 3: 1, 4: 2, 5: 2}
    paths = {}
    for node, parent in parents.items():
        paths[node] = [*paths.get(parent, []), node]
    bits = torch.tensor([sum(1 << j for j in paths[node]) for node in parents])
    out = _attend_chunk(q, k, v, prefix, ancestors=bits)
    for path in paths.values():
        rows = [*range(prefix), *(prefix + node for node in path)]
        alone = _attend_chunk(q[path], k[rows], v[rows], prefix)
        torch.testing.assert_close(out[path[-1]], alone[-1])


def test_a_chain_of_sixty_four_is_causal():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, 2, 8, generator=generator)
    k, v = (torch.randn(67, 2, 8, generator=generator) for _ in range(2))
    chain = torch.tensor([(1 << (i + 1)) - 1 if i < 63 else -1 for i in range(64)])
    torch.testing.assert_close(_attend_chunk(q, k, v, 3, ancestors=chain), _attend_chunk(q, k, v, 3))
    with pytest.raises(PerfmodelError, match="window=8"):
        _attend_chunk(q, k, v, 3, ancestors=chain, window=8)
