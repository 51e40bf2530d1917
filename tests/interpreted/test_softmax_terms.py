"""Attention with capped scores (Gemma 2) and with sinks (gpt-oss), against the definition written out."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.attention_prefill import AttentionRule  # noqa: E402
from perfmodel_executors.kernels.kv_pages import Chunks, random_pages  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE, LENGTH = 6, 2, 16, 16, 83
KERNELS = load_kernels("triton")
CASES = [
    {"cap": 2.0},
    {"has_sinks": True},
    {"cap": 5.0, "has_sinks": True},
    {"has_sinks": True, "window": 21},
    {"cap": 3.0, "has_sinks": True, "chunk": 24},
]


def sequence(scale=2.0):
    inputs, width = Inputs("cpu", seed=2), -(-LENGTH // PAGE)
    q = inputs.normal(LENGTH, HEADS, DIM, dtype=torch.float32, scale=scale)
    pages = random_pages(inputs, width + 2, PAGE, KV_HEADS, (DIM, DIM), torch.float32, torch.float32)
    sinks = inputs.normal(HEADS, dtype=torch.float32, scale=2.0)
    return q, pages, inputs.permutation(width + 2)[None, :width], sinks


def expected(q, pages, table, sinks, cap=None, window=None, chunk=None):
    """Every query in fp64, one head at a time."""
    k, v = (rows[:LENGTH].double() for rows in pages.gathered(table[0], torch.float32))
    position = torch.arange(LENGTH)
    seen = position[None, :] <= position[:, None]
    if window is not None:
        seen &= position[None, :] > position[:, None] - window
    if chunk is not None:
        seen &= position[None, :] >= (position // chunk * chunk)[:, None]
    out = torch.empty(LENGTH, HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = q[:, head].double() @ k[:, group].T / math.sqrt(DIM)
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        powers = torch.where(seen, scores.exp(), 0.0)
        total = powers.sum(1) + (0.0 if sinks is None else sinks[head].double().exp())
        out[:, head] = powers @ v[:, group] / total[:, None]
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prompts_and_decodes_are_what_the_definition_says(case):
    spans = {name: case[name] for name in ("window", "chunk") if name in case}
    q, pages, table, sinks = sequence()
    terms = {"cap": case.get("cap"), "sinks_N": sinks if case.get("has_sinks") else None}
    right = expected(q, pages, table, terms["sinks_N"], terms["cap"], **spans).float()
    chunks, rule = Chunks(table, torch.tensor([0, LENGTH - 30]), torch.tensor([30])), AttentionRule(**spans, **terms)
    prompt = KERNELS.attention_prefill(q[30:], pages, chunks, rule)
    torch.testing.assert_close(prompt, right[30:], rtol=0, atol=2e-6)
    for splits in (1, 3, 9):
        decode = KERNELS.attention_decode(q[-1:], pages, table, torch.tensor([LENGTH]), rule, num_splits=splits)
        torch.testing.assert_close(decode, right[-1:], rtol=0, atol=2e-6)


def test_scores_far_beyond_the_cap_stay_at_it():
    """Powers overflow to infinity, and their quotient to zero: no NaN."""
    q, pages, table, _ = sequence(scale=1e4)
    decode = KERNELS.attention_decode(q[-1:], pages, table, torch.tensor([LENGTH]), AttentionRule(cap=1.0))
    assert decode.isfinite().all()


def test_a_large_sink_takes_all_and_a_small_one_nothing():
    q, pages, table, _ = sequence()
    args = (q[-1:], pages, table, torch.tensor([LENGTH]))
    for splits in (1, 4):
        plain = KERNELS.attention_decode(*args, num_splits=splits)
        small, large = (AttentionRule(sinks_N=torch.full((HEADS,), sink)) for sink in (-80.0, 80.0))
        nothing = KERNELS.attention_decode(*args, small, num_splits=splits)
        torch.testing.assert_close(nothing, plain, rtol=0, atol=1e-6)
        everything = KERNELS.attention_decode(*args, large, num_splits=splits)
        assert everything.abs().max() < 1e-6
