"""Sampling draws what the distribution says, of what top-k and top-p leave."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel_executors.kernels import load_kernels  # noqa: E402

SAMPLE = load_kernels().sample_top_k_top_p
LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5, -3.0])


def draw(temperature=1.0, top_k=0, top_p=1.0, draws=4000, logits=LOGITS):
    """Frequencies over evenly spaced uniform numbers: no chance is left in them but rounding to 1 / draws."""
    uniforms = (torch.arange(draws) + 0.5) / draws
    tokens = SAMPLE(
        logits.expand(draws, -1),
        torch.full((draws,), temperature),
        torch.full((draws,), top_k, dtype=torch.int32),
        torch.full((draws,), top_p),
        uniforms,
    )
    return torch.bincount(tokens, minlength=len(logits)) / draws


def kept(mask, temperature=1.0):
    weights = torch.where(torch.tensor(mask), (LOGITS / temperature).exp(), 0.0)
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    torch.testing.assert_close(draw(temperature), torch.softmax(LOGITS / temperature, 0), rtol=0, atol=1 / 1000)


def test_top_k_leaves_k_tokens_in_their_proportion():
    expected = kept([False, True, False, True, True, False])
    torch.testing.assert_close(draw(top_k=3), expected, rtol=0, atol=1 / 1000)


def test_top_p_leaves_the_fewest_tokens_that_reach_it():
    """Probabilities 0.56, 0.20, 0.12, 0.08, ...: 0.7 takes two, 0.8 three; of what top-3 leaves (0.63, 0.23, 0.14)
    0.8 takes two."""
    two, three = [False, True, False, True, False, False], [False, True, False, True, True, False]
    torch.testing.assert_close(draw(top_p=0.7), kept(two), rtol=0, atol=1 / 1000)
    torch.testing.assert_close(draw(top_p=0.8), kept(three), rtol=0, atol=1 / 1000)
    torch.testing.assert_close(draw(top_k=3, top_p=0.8), kept(two), rtol=0, atol=1 / 1000)


def test_temperature_zero_is_greedy_with_the_first_of_equal_tokens():
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert draw(0.0, top_p=0.9, logits=logits).tolist() == [0, 1, 0, 0]


def test_what_is_nearly_impossible_is_not_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert draw(logits=logits).tolist() == [0, 1, 0]
