"""Decodes over latents: split or not, in whichever tiles, what the definition says."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels.attention_latent.pages import LatentPages  # noqa: E402
from perfmodel_executors.kernels.attention_latent.triton import attention_latent_decode  # noqa: E402
from perfmodel_executors.kernels.launch import Options  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig  # noqa: E402

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
    return q, pages, tables, torch.tensor(CONTEXTS), keys, values, SCALE


def expected(q, pages, tables, contexts, keys, values, scale):
    """Keys and values of every head made of the latents, in fp64, without absorbing anything."""
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
