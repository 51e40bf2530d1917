"""Attention over latents: split or not, absorbed or expanded, in whichever tiles, what the definition says."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels.attention_latent import LatentHeads, LatentPages  # noqa: E402
from perfmodel_executors.kernels.kv_pages import Chunks  # noqa: E402
from perfmodel_executors.kernels.launch import Options  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig  # noqa: E402
from perfmodel_executors.kernels.triton import attention_latent as latent  # noqa: E402
from perfmodel_executors.kernels.triton.attention_latent import (  # noqa: E402
    attention_latent_decode,
    attention_latent_prefill,
)

HEADS, NOPE, ROTATED, RANK, VALUE, PAGE = 6, 12, 8, 32, 10, 4
CONTEXTS = [1, 19, 40]
SCALE = 1 / math.sqrt(NOPE + ROTATED)


def arguments():
    inputs, width = Inputs("cpu", seed=4), -(-max(CONTEXTS) // PAGE)
    blocks = width * len(CONTEXTS) + 1
    pages = LatentPages(inputs.normal(blocks, PAGE, RANK + ROTATED, dtype=torch.float32))
    tables = inputs.permutation(blocks)[: width * len(CONTEXTS)].view(len(CONTEXTS), width)
    q = inputs.normal(len(CONTEXTS), HEADS, NOPE + ROTATED, dtype=torch.float32)
    keys = inputs.normal(HEADS, NOPE, RANK, dtype=torch.float32, scale=RANK**-0.5)
    values = inputs.normal(HEADS, VALUE, RANK, dtype=torch.float32, scale=RANK**-0.5)
    return q, pages, tables, torch.tensor(CONTEXTS), LatentHeads(keys, values, SCALE)


def expected(q, pages, tables, contexts, heads):
    """Keys and values of every head made of the latents, in fp64, without absorbing anything."""
    keys, values, scale = heads
    out = torch.empty(len(contexts), HEADS, VALUE, dtype=torch.float64)
    for row, context in enumerate(contexts.tolist()):
        latents = pages.gathered(tables[row])[:context].double()
        for head in range(HEADS):
            k = torch.cat((latents[:, :RANK] @ keys[head].double().T, latents[:, RANK:]), dim=1)
            weights = torch.softmax(k @ q[row, head].double() * scale, dim=0)
            out[row, head] = weights @ (latents[:, :RANK] @ values[head].double().T)
    return out.float()


@pytest.mark.parametrize("splits", [None, 1, 3, 7])
@pytest.mark.parametrize("tile", [None, (16, 16), (64, 32)])
def test_absorbed_decodes_are_those_of_keys_and_values_made_of_latents(splits, tile):
    """Also with more splits than the shortest context has tiles."""
    config = None if tile is None else TileConfig({"ROWS": tile[0], "TILE": tile[1]}, Options(4, 2))
    args = arguments()
    out = attention_latent_decode(*args, num_splits=splits, config=config)
    torch.testing.assert_close(out, expected(*args), rtol=0, atol=2e-6)


def prompt(new, before):
    """A chunk of a sequence: queries, where its latents are, heads."""
    q, pages, tables, _, heads = arguments()
    q = Inputs("cpu", seed=new).normal(new, HEADS, NOPE + ROTATED, dtype=torch.float32)
    assert new + before <= CONTEXTS[-1]
    return q, pages, Chunks(tables[2:], torch.tensor([0, new]), torch.tensor([before])), heads


@pytest.mark.parametrize(("new", "before"), [(40, 0), (19, 20), (3, 37)])
@pytest.mark.parametrize("tile", [None, (32, 16), (64, 64)])
def test_prompts_are_so_many_decodes(monkeypatch, new, before, tile):
    """Whichever way is less work, and with heads in groups of two, as a long context takes them."""
    monkeypatch.setattr(latent, "_WORKSPACE_BYTES", 2 * 40 * (16 + 16) * 4)
    config = tile and TileConfig({"ROWS": tile[0], "KEYS": tile[1], "DESCRIPTORS": 0}, Options(4, 2))
    q, pages, chunks, heads = prompt(new, before)
    out = attention_latent_prefill(q, pages, chunks, heads, config=config)
    contexts = before + 1 + torch.arange(new)
    torch.testing.assert_close(
        out, expected(q, pages, chunks.tables_GM.expand(new, -1), contexts, heads), rtol=0, atol=2e-6
    )


def test_what_lies_behind_a_prompt_is_never_used():
    q, pages, chunks, heads = prompt(19, 18)
    table = chunks.tables_GM
    pages.latents_BSW[table[0, 37 // PAGE], 37 % PAGE :] = torch.nan
    pages.latents_BSW[table[0, 37 // PAGE + 1 :]] = torch.nan
    assert attention_latent_prefill(q, pages, chunks, heads).isfinite().all()


def test_few_new_tokens_behind_a_long_prefix_are_absorbed():
    """DeepSeek-V3: absorbed costs 2 * 768 FLOPs more a pair, expanded 2 * 131,072 more a token of the prefix, which is
    170.7 queries' worth."""
    heads = LatentHeads(torch.empty(128, 128, 512, device="meta"), torch.empty(128, 128, 512, device="meta"), 1.0)
    assert heads.absorbs(170, 1 << 20)
    assert not heads.absorbs(171, 1 << 20)
    assert not heads.absorbs(16, 16)
