"""Scans: in chunks or step by step, by tiles or at once, what the recurrence says in fp64."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs  # noqa: E402
from perfmodel_executors.kernels.scan import ScanInputs  # noqa: E402

HEADS, GROUPS, KEYS, VALUES = 2, 1, 16, 16
KERNELS = {name: load_kernels(name) for name in ("torch", "triton")}


def tokens(length, erases, are_alike=False):
    """Keys of length one, or all the same one that nothing decays: what cancels worst."""
    inputs = Inputs("cpu", seed=length)
    q, k = (
        torch.nn.functional.normalize(inputs.normal(length, GROUPS, KEYS, dtype=torch.float32), dim=2) for _ in "qk"
    )
    v = inputs.normal(length, HEADS, VALUES, dtype=torch.float32)
    decay, beta = (inputs.normal(length, HEADS, dtype=torch.float32).sigmoid() for _ in "ab")
    if are_alike:
        k, decay, beta = k[:1].expand(length, -1, -1).contiguous(), torch.zeros_like(decay), torch.ones_like(beta)
    skip = None if erases else inputs.normal(HEADS, dtype=torch.float32)
    return ScanInputs(q, k, v, -decay, beta, skip, erases, 64)


def recurrence(inputs, state):
    """Token after token, in fp64, of one sequence."""
    state, out = state.double(), []
    q, k, v, log_decay, beta = (part.double() for part in inputs[:5])
    for token in range(len(v)):
        state = state * log_decay[token].exp()[:, None, None]
        held = torch.einsum("gk,hkv->hv", k[token], state) if inputs.erases else 0.0
        state = state + torch.einsum("gk,hv->hkv", k[token], (v[token] - held) * beta[token, :, None])
        out.append(torch.einsum("gk,hkv->hv", q[token], state))
        if inputs.skip_H is not None:
            out[-1] += inputs.skip_H[:, None] * v[token]
    return torch.stack(out), state


def states(seed):
    return Inputs("cpu", seed).normal(3, HEADS, KEYS, VALUES, dtype=torch.float32)


def run(kernels, inputs, state, row=1):
    return kernels.scan_prefill(inputs, torch.tensor([row]), torch.tensor([0, len(inputs.v_THV)]), state)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("erases", "are_alike"), [(False, False), (True, False), (True, True)])
def test_a_prompt_in_tiles_is_the_recurrence(backend, erases, are_alike):
    """With 64 equal keys powers of what tokens erase have entries of 10^18, in sums that are one."""
    inputs, state = tokens(80, erases, are_alike), states(1)
    expected, last = recurrence(inputs, state[1])
    out = run(KERNELS[backend], inputs, state)
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(state[1], last.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(state[[0, 2]], states(1)[[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize("erases", [False, True])
def test_a_prompt_in_parts_is_the_prompt_at_once_and_its_last_token_a_step(erases):
    inputs, whole, parts = tokens(75, erases), states(2), states(2)
    kernels = KERNELS["triton"]
    expected = run(kernels, inputs, whole)
    found = [run(kernels, inputs.tokens(slice(*ends)), parts) for ends in ((0, 3), (3, 74))]
    found.append(kernels.scan_decode(inputs.tokens(slice(74, 75)), torch.tensor([1]), parts))
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_a_convolution_in_parts_is_the_convolution_at_once():
    """Parts shorter than the taps take their inputs from two parts before."""
    kernels, inputs = KERNELS["triton"], Inputs("cpu", seed=3)
    x, weight, bias = (inputs.normal(*shape, dtype=torch.float32) for shape in ((40, 10), (10, 4), (10,)))
    left = inputs.normal(3, 10, 3, dtype=torch.float32)
    window = torch.cat((left[2].T, x)).unfold(0, 4, 1)
    expected = torch.nn.functional.silu((window * weight).sum(-1) + bias)
    row, found, begin = torch.tensor([2]), [], 0
    for length in (1, 2, 1, 36):
        part = x[begin : begin + length]
        if length == 1:
            found.append(kernels.causal_conv_decode(part, row, left, weight, bias))
        else:
            found.append(kernels.causal_conv_prefill(part, row, torch.tensor([0, length]), left, weight, bias))
        begin += length
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(left[2], x[-3:].T, rtol=0, atol=0)
